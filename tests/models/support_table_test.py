from tests.models import support_table


def test_the_page_has_what_families_are_tested_for():
  assert support_table.PAGE.read_text() == support_table.page(), (
    "docs/guides/models.md is out of date: python -m tests.models.support_table"
  )
