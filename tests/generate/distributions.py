"""What a draw should give, by plain loops, and whether it did."""

import numpy as np
from scipy import special


def exact(logits, temperature=1.0, top_k=None, top_p=None, min_p=None, forbidden=()):
  """The distribution of one draw, float64 [V]; no two likely tokens may be equal."""
  scaled = np.asarray(logits, np.float64) / temperature
  scaled[list(forbidden)] = -np.inf
  order = np.argsort(-scaled, kind="stable")
  kept = list(order if top_k is None else order[:top_k])
  if top_p is not None:
    chances = special.softmax(scaled[kept])
    total, count = 0.0, 0
    while total < top_p and count < len(kept):
      total, count = total + chances[count], count + 1
    kept = kept[:count]
  if min_p is not None:
    best = scaled[order[0]]
    kept = [i for i in kept if np.exp(scaled[i] - best) >= min_p]
  out = np.zeros(len(scaled))
  out[kept] = special.softmax(scaled[kept])
  return out


def p_value(seen, chances):
  """Of the chi-square test that counts [V] follow `chances`; 0 where something came
  that cannot. What is expected fewer than 5 times is one class."""
  from scipy import stats  # slow to import

  seen, expected = np.asarray(seen, float), chances * np.sum(seen)
  if seen[chances == 0].any():
    return 0.0
  common = expected >= 5
  observed, wanted = seen[common], expected[common]
  rare = expected[~common].sum()
  if rare >= 1:
    observed = np.append(observed, seen[~common].sum())
    wanted = np.append(wanted, rare)
  wanted = wanted * observed.sum() / wanted.sum()
  return 1.0 if len(observed) == 1 else stats.chisquare(observed, wanted).pvalue
