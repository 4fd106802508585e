from tests.models import sizes_table


def test_the_page_has_the_presets_sizes():
  assert sizes_table.PAGE.read_text() == sizes_table.page(), (
    "docs/guides/sizes.md is out of date: python -m tests.models.sizes_table"
  )
