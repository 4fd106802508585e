"""Makes report.png: the page of the quickstart's GRPO run, in headless Chromium.

  python docs/images/make.py [FOLDER]

FOLDER is the output of a `tunix quickstart`; without it, the quickstart runs first.
"""

import pathlib
import subprocess
import sys
import tempfile

IMAGES = pathlib.Path(__file__).parent
WIDTH, HEIGHT = 1200, 470  # pixels: the title and the first row of curves


def main() -> None:
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(sys.argv[1] if sys.argv[1:] else f"{scratch}/quickstart")
    if not folder.exists():
      command = [sys.executable, "-m", "tunix.cli.main", "quickstart"]
      subprocess.run([*command, f"--output={folder}"], check=True)
    page = (folder / "grpo" / "report.html").absolute().as_uri()
    size = f"--window-size={WIDTH},{HEIGHT}"
    subprocess.run(
      [
        *("chromium", "--headless", "--no-sandbox", "--disable-gpu"),
        *("--hide-scrollbars", f"--user-data-dir={scratch}/profile", size),
        *(f"--screenshot={IMAGES / 'report.png'}", page),
      ],
      check=True,
    )


if __name__ == "__main__":
  main()
