import io

from tunix.utils import terminal


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_control_characters_are_escaped_for_a_terminal_only():
  text = "a\tb\n\x1b]0;title\x07\x9b2J\r\x7f ü\u2028\u202e"
  safe = "a\tb\n\\x1b]0;title\\x07\\x9b2J\\x0d\\x7f ü\\u2028\\u202e"
  assert terminal.shown(text, Terminal()) == safe
  assert terminal.shown(text, io.StringIO()) == text
  assert terminal.shown("a\ud800", io.StringIO()) == "a\\ud800"
  marked = "yes".join(terminal.COLOUR)
  assert terminal.shown(marked, Terminal()) == marked


def test_a_text_for_a_log_is_one_line():
  assert terminal.one_line("a\nstep 1: b\u2028c\x85 d\r") == "a step 1: b c d"


def test_a_number_has_its_noun():
  assert terminal.counted(1, "step") == "1 step"
  assert terminal.counted(1000, "micro-batch") == "1,000 micro-batches"
  assert terminal.counted(0, "pair of equal responses") == "0 pairs of equal responses"
