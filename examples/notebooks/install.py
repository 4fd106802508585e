# Badges and the install cell; make.py inserts them at `# %% include install`.

# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/{{path}}/blob/main/examples/notebooks/{{name}}.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src={{repository}}/blob/main/examples/notebooks/{{name}}.ipynb)
#
# The next cell installs tunix with the JAX of this machine: for an NVIDIA GPU, for a
# TPU, or for the CPU. It does nothing where tunix is installed.

# %%
import glob
import importlib.util
import re
import shutil
import subprocess
import sys

REPOSITORY = "{{repository}}"
if importlib.util.find_spec("tunix") is None:
  extras = "notebooks"
  if shutil.which("nvidia-smi"):
    shown = subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
    extras += ",cuda" if re.search(r"CUDA Version: 1[3-9]", shown) else ",cuda12"
  elif glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"):
    extras += ",tpu"
  package = f"tunix[{extras}] @ git+{REPOSITORY}"
  pip = [sys.executable, "-m", "pip", "install", "--quiet", package]
  subprocess.run(pip, check=True)
