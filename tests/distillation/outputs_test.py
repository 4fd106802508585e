"""Labels of every form, and functions that take some of the fields."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.distillation import outputs
from tunix.distillation.outputs import Labels, Unembedded
from tunix.ops.vocabulary.softmax import Layout

LOGITS = jnp.log(jnp.asarray([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]]))


def test_labels_of_all_forms_say_the_same():
  forms = [
    Labels(jnp.asarray([[1, 0]]), jnp.asarray([[1.0, 0.0]])),
    jnp.asarray([[1, -100]]),
    jnp.asarray([[[0.0, 1, 0], [0, 0, 0]]]),
  ]
  for labels in forms:
    nll, weights = outputs.task_loss(LOGITS, labels)
    np.testing.assert_allclose(weights, [[1, 0]])
    np.testing.assert_allclose(nll[0, 0], np.log(4), rtol=1e-6)
    np.testing.assert_array_equal(outputs.label_weights(labels), weights)


def test_smoothed_labels():
  labels = jnp.asarray([[[0.5, 0.5, 0.0], [0, 0, 1]]])
  nll, _ = outputs.task_loss(LOGITS, labels)
  want = [[(np.log(2) + np.log(4)) / 2, -np.log(0.8)]]
  np.testing.assert_allclose(nll, want, rtol=1e-6)


def test_hidden_states_are_scored_as_their_logits():
  hidden, table = (
    jax.random.normal(jax.random.key(0), (2, 1, 2, 4))[0],
    jnp.eye(4)[:, :3],
  )
  labels = jnp.asarray([[2, -1]])
  got = outputs.task_loss(Unembedded(hidden, table, Layout()), labels)
  want = outputs.task_loss(hidden @ table, labels)
  np.testing.assert_allclose(got.nll, want.nll, rtol=1e-5)


def test_labels_of_other_shapes_are_refused():
  with pytest.raises(ValueError, match="one label for each position"):
    outputs.task_loss(LOGITS, jnp.asarray([[1, 2, 0]]))
  with pytest.raises(ValueError, match="each position and token"):
    outputs.task_loss(LOGITS, jnp.zeros((1, 2, 4)))


def test_functions_get_what_they_take():
  inputs = {"a": 1, "b": 2}
  assert outputs.call(lambda model, b: (model, b), "m", inputs=inputs) == ("m", 2)
  assert outputs.call(lambda model, **all_: all_, "m", inputs=inputs) == inputs
  assert outputs.call(lambda a=0, c=5: (a, c), inputs=inputs) == (1, 5)


def test_loss_weights_multiply():
  inputs = {
    "input_tokens": jnp.asarray([[5, 6, 7]]),
    "input_mask": jnp.asarray([[1, 1, 1]]),
    "loss_weights": jnp.asarray([[1.0, 0.5, 2.0]]),
  }
  labels = outputs.next_tokens(inputs)
  assert labels.targets[0, :2].tolist() == [6, 7]
  assert labels.weights.tolist() == [[0.5, 2.0, 0.0]]


def test_missing_fields_are_named():
  with pytest.raises(ValueError, match="without \\['input_mask'\\]"):
    outputs.next_tokens({"input_tokens": jnp.zeros((1, 2))})
  with pytest.raises(ValueError, match="without input_tokens"):
    outputs.logits(None, {"words": 1})
