"""The texts of examples/minigpt.py: generated stories and scenes, or files of yours.

    python examples/minigpt_text.py  # prints two stories and two scenes

A grammar writes the texts. Every text has a hero, a lost thing and a helper who fits
the place where it was lost, so a model has more to learn than a list of words.
"""

import collections
import pathlib
import random
import re
import string


def listed(text):
  return text.split(", ")


ANIMALS = listed("bear, cat, dog, duck, fox, goat, hare, hen, horse, lamb, mouse, pig")
NAMES = {
  "he": listed("Ben, Finn, Hugo, Jack, Leo, Max, Oscar, Sam, Tom, Will"),
  "she": listed("Anna, Clara, Daisy, Ella, Ivy, Lily, Mia, Nora, Rose, Sue"),
}
TRAITS = listed(
  "brave, clever, curious, gentle, hungry, little, proud, shy, silly, sleepy"
)
COLOURS = listed("blue, golden, green, old, red, shiny, tiny, white")
THINGS = listed("ball, bell, boat, book, button, crown, hat, kite, ring, spoon")
HOMES = listed(
  "barn, bridge, castle, forest, garden, hill, mill, river, village, windmill"
)
DAYS = listed("morning, afternoon, evening")
SKIES = listed("cloudy, cold, rainy, snowy, sunny, windy")
FOODS = listed("an apple, a cake, a cherry pie, a honey cake, some bread, some soup")
# How the thing is lost, and what the helpers of that place do.
TROUBLES = (
  (
    ("fell into the pond", "rolled into the pond"),
    {"frog": "jumped into the water", "otter": "swam to the bottom"},
  ),
  (
    ("fell into a deep hole", "slipped into a deep hole"),
    {"mole": "dug in the dark", "badger": "climbed down"},
  ),
  (
    ("flew into the tall tree", "was caught in the tall tree"),
    {"squirrel": "ran up the tree", "owl": "flew to the top"},
  ),
  (
    ("rolled under the heavy stones", "vanished under the heavy stones"),
    {"ox": "pushed the stones away", "ant": "crept under the stones"},
  ),
)
MORALS = (
  "a friend is better than a treasure",
  "it is good to ask for help",
  "even the smallest can do great things",
  "kind words open every door",
)


def story(rng):
  """Returns a short story for children."""
  he = rng.choice(("he", "she"))
  his, he_too = {"he": ("his", "He"), "she": ("her", "She")}[he]
  name, animal, home = rng.choice(NAMES[he]), rng.choice(ANIMALS), rng.choice(HOMES)
  trait, thing, colour = rng.choice(TRAITS), rng.choice(THINGS), rng.choice(COLOURS)
  losses, helpers = rng.choice(TROUBLES)
  helper, deed = rng.choice(list(helpers.items()))
  when = f"One {rng.choice(SKIES)} {rng.choice(DAYS)}"
  opening = rng.choice(
    (
      f"Once upon a time there was a {trait} {animal} named {name}.",
      f"Once upon a time a {trait} {animal} named {name} lived near the {home}.",
      f"Once upon a time, near the {home}, lived {name}, a {trait} {animal}.",
    )
  )
  love = rng.choice(
    (
      f"{he_too} loved {his} {colour} {thing}.",
      f"Every day {he} played with {his} {colour} {thing}.",
      f"{he_too} had a {colour} {thing} and took it everywhere.",
    )
  )
  loss = f"{when} the {thing} {rng.choice(losses)}."
  grief = rng.choice(
    (f'"Oh no!" cried {name}.', f"{name} sat down and wept.", f"{name} was very sad.")
  )
  help_ = rng.choice(
    (
      f'"I can help you," said the {helper}.',
      f'A friendly {helper} heard it. "Do not worry," said the {helper}.',
    )
  )
  end = rng.choice(
    (
      f'"Thank you!" said {name}, and they shared {rng.choice(FOODS)}.',
      f"From that day on, {name} and the {helper} were best friends.",
      f"So {name} learned that {rng.choice(MORALS)}.",
    )
  )
  found = f"The {helper} {deed} and brought the {thing} back."
  return " ".join((opening, love, loss, grief, help_, found, end))


KINGS = listed("Duncan, Edmund, Harold, Henry, Oswald, Richard")
LORDS = listed("Bertram, Cedric, Godwin, Hubert, Lionel, Percival")
REALMS = listed("Albion, Cornwall, Kent, Mercia, Norland, York")
THIEVES = listed("fox, magpie, raven, rat, knave, stable-boy")


def speech(rng):
  """Returns a scene of a play about a king who misses something."""
  king, lord, realm = rng.choice(KINGS), rng.choice(LORDS), rng.choice(REALMS)
  thing, colour, thief = rng.choice(THINGS), rng.choice(COLOURS), rng.choice(THIEVES)
  prologue = rng.choice(
    (
      f"Once upon a time, good people, there reigned in {realm} a king hight {king}.",
      f"Once upon a time, my masters, {king} of {realm} sat upon his throne.",
    )
  )
  question = rng.choice(
    (
      f"Alas! Who hath stolen my {colour} {thing}?",
      f"Ho, {lord}! Where is my {colour} {thing}?",
      f"Fie! Thou hast lost my {thing}, thou idle lord!",
    )
  )
  answer = rng.choice(
    (
      f"Nay, my liege, methinks the {thief} hath taken it.",
      f"I swear, my lord, I saw the {thief} bear it hence.",
      f"Forgive me, sire, 'twas the {thief} that did the deed.",
    )
  )
  command = rng.choice(
    (
      "Then fetch it hither ere the sun doth set!",
      "Bring me the villain's head, or lose thine own!",
      "Saddle my horse, for I will hunt the rogue myself!",
    )
  )
  leave = rng.choice(
    ("I fly, my lord. [Exit.]", "Thy will be done. [Exeunt.]", "God save the king!")
  )
  return (
    f"{prologue}\n{king.upper()}: {question}\n{lord.upper()}: {answer}\n"
    f"{king.upper()}: {command}\n{lord.upper()}: {leave}"
  )


def texts(make, size, seed):
  """Returns texts of `size` characters in total."""
  rng, out = random.Random(seed), []
  while size > 0:
    out.append(make(rng))
    size -= len(out[-1])
  return out


def read_texts(path):
  """Returns the texts of a file, separated by <|endoftext|> or else by blank lines."""
  whole = pathlib.Path(path).read_text()
  separator = r"<\|endoftext\|>" if "<|endoftext|>" in whole else r"\n\s*\n"
  return [text for part in re.split(separator, whole) if (text := part.strip())]


# A word with the space before it, a sign with it, or a single white space.
_PIECE = re.compile(r" ?\w+| ?[^\w\s]|\s")


class Words:
  """A tokenizer of whole words, built from texts.

  Its vocabulary has the most frequent words of the texts, their characters, and the
  letters and digits of ASCII. A word that is not in the vocabulary is written in
  characters, so every text of known characters is decoded as it was.
  """

  def __init__(self, lines, most=4000):
    counts = collections.Counter(p for line in lines for p in _PIECE.findall(line))
    characters = {*string.ascii_letters, *string.digits, *"".join(counts)}
    frequent = [piece for piece, _ in counts.most_common(most)]
    self.words = ["<end>", *sorted({*characters, *frequent})]
    self.ids = {word: i for i, word in enumerate(self.words)}
    # Two devices do not divide a vocabulary such as GPT-2's 50257. A multiple of 64
    # can be split; the additional tokens are never a target.
    self.vocab_size = -(-len(self.words) // 64) * 64

  def encode(self, text, **_):
    """Returns the ids of a text. Characters that no text had are left out."""
    pieces = _PIECE.findall(text)
    known = (part for p in pieces for part in ([p] if p in self.ids else p))
    return [self.ids[part] for part in known if part in self.ids]

  def decode(self, ids, **_):
    return "".join(self.words[i] if i < len(self.words) else "?" for i in map(int, ids))

  def bos_id(self):
    return None

  def eos_id(self):
    return 0

  def pad_id(self):
    return 0


def words_in(text):
  return re.findall(r"\w+", text)


def share_of_new(text, lines):
  """Returns the share of the words of `text` that occur in none of `lines`."""
  known, words = set(words_in("\n".join(lines))), words_in(text)
  return sum(word not in known for word in words) / max(1, len(words))


if __name__ == "__main__":
  for each in (*texts(story, 500, seed=0), *texts(speech, 500, seed=0)):
    print(f"{each}\n")
