import io

from tunix.utils import terminal


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_control_characters_are_escaped_for_a_terminal_only():
  text = "a\tb\n\x1b]0;title\x07\x9b2J\r\x7f ü\u2028"
  safe = "a\tb\n\\x1b]0;title\\x07\\x9b2J\\x0d\\x7f ü\u2028"
  assert terminal.shown(text, Terminal()) == safe
  assert terminal.shown(text, io.StringIO()) == text
  marked = "yes".join(terminal.COLOUR)
  assert terminal.shown(marked, Terminal()) == marked
