"""A train step and a decode loop of Qwen 3's form, written by hand in plain JAX.

No library in the way: dicts of arrays, unrolled layers, whole logits. It is the limit
that the figures of docs/performance.md are compared with, and it must give the same
losses and tokens.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.adapter import Clock

KERNELS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Weights = dict[str, Any]


def load(path: str) -> tuple[dict[str, Any], Weights]:
  """(config.json, {"embed", "norm", "layers": one dict a layer}) of a folder."""
  import json
  import pathlib

  from safetensors.numpy import load_file

  config = json.loads((pathlib.Path(path) / "config.json").read_text())
  raw: Weights = {}
  for file in sorted(pathlib.Path(path).glob("*.safetensors")):
    raw |= load_file(file)
  layers: list[Weights] = [{} for _ in range(config["num_hidden_layers"])]
  out: Weights = {"layers": layers}
  for name, value in raw.items():
    parts = name.removeprefix("model.").split(".")
    if parts[0] == "layers":
      kernel = parts[-2] in KERNELS
      layers[int(parts[1])][parts[-2]] = jnp.asarray(value.T if kernel else value)
    else:
      out[parts[0]] = jnp.asarray(value)
  return config, out


def norm(x, scale, eps):
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def rotate(x, positions, theta):
  half = x.shape[-1] // 2
  angle = positions[..., None] / theta ** (jnp.arange(half) / half)
  sin, cos = jnp.sin(angle)[:, :, None], jnp.cos(angle)[:, :, None]
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def layer(c, w, x, positions, mask, cache=None, at=0):
  """One decoder layer; returns (x, (keys, values)).

  x [B, T, D]; mask [B or 1, T, S]; cache: keys and values [B, S, K, H] to write at."""
  batch, length, _ = x.shape
  eps, head = c["rms_norm_eps"], c["head_dim"]
  h = norm(x, w["input_layernorm"], eps)
  q, k, v = (
    linear(w, f"{n}_proj", h).reshape(batch, length, -1, head) for n in ("q", "k", "v")
  )
  theta = c["rope_parameters"]["rope_theta"]
  q = rotate(norm(q, w["q_norm"], eps), positions, theta)
  k = rotate(norm(k, w["k_norm"], eps), positions, theta)
  if cache is not None:
    k, v = (
      jax.lax.dynamic_update_slice(a, b, (0, at, 0, 0)) for a, b in zip(cache, (k, v))
    )
  groups = q.reshape(batch, length, k.shape[2], -1, head)
  scores = jnp.einsum("btkgh,bskh->bkgts", groups, k) * head**-0.5
  scores = jnp.where(mask[:, None, None], scores, -1e30)
  mixed = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores, -1), v)
  x = x + linear(w, "o_proj", mixed.reshape(batch, length, -1))
  h = norm(x, w["post_attention_layernorm"], eps)
  gate = jax.nn.silu(linear(w, "gate_proj", h))
  return x + linear(w, "down_proj", gate * linear(w, "up_proj", h)), (k, v)


def linear(w, name, x):
  y = x @ w[name]
  if name + ".a" in w:
    y = y + (x @ w[name + ".a"]) @ w[name + ".b"]
  return y


def head(c, w):
  return w["embed_tokens"].T if c["tie_word_embeddings"] else w["lm_head"].T


def loss_fn(c, w, ids):
  """Mean next-token cross-entropy; ids [B, T]."""
  length = ids.shape[1]
  positions = jnp.arange(length)[None]
  mask = jnp.tril(jnp.ones((length, length), bool))[None]
  x = w["embed_tokens"][ids]
  for block in w["layers"]:
    x, _ = layer(c, block, x, positions, mask)
  logits = norm(x, w["norm"], c["rms_norm_eps"])[:, :-1] @ head(c, w)
  return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def add_lora(w, rank):
  """Fresh adapters on every kernel: a list of dicts, one a layer."""
  rng, out = np.random.default_rng(0), []
  for block in w["layers"]:
    pairs = {}
    for name in KERNELS:
      rows, columns = block[name].shape
      a = rng.normal(0, rows**-0.5, (rows, rank)).astype(np.float32)
      pairs |= {f"{name}.a": jnp.asarray(a), f"{name}.b": jnp.zeros((rank, columns))}
    out.append(pairs)
  return out


class Plain:
  """The methods of `adapter.Adapter` that figures are compared by."""

  def sft(self, path: str, ids: np.ndarray, lora_rank=0, lr=1e-4) -> dict[str, Any]:
    c, w = load(path)
    trained = add_lora(w, lora_rank) if lora_rank else w
    frozen = w if lora_rank else None
    tx = optax.adamw(lr)

    def loss(trained, frozen, ids):
      whole = trained
      if frozen is not None:
        layers = [a | b for a, b in zip(frozen["layers"], trained)]
        whole = frozen | {"layers": layers}
      return loss_fn(c, whole, ids)

    def step(trained, state, frozen, ids):
      value, grads = jax.value_and_grad(loss)(trained, frozen, ids)
      updates, state = tx.update(grads, state, trained)
      return optax.apply_updates(trained, updates), state, value

    run = jax.jit(step, donate_argnums=(0, 1))
    state, losses, clock = tx.init(trained), [], Clock()
    for batch in ids:
      trained, state, value = run(trained, state, frozen, jnp.asarray(batch))
      losses.append(round(float(value), 5))
      clock.tick()
    return {**clock.summary(), "losses": losses}

  def loss_and_params(self, path: str):
    c, w = load(path)
    return (lambda w, ids: loss_fn(c, w, ids)), w

  def generate(self, path, ids, new, temperature=0.0, reps=3) -> dict[str, Any]:
    """Greedy decoding of `new` tokens with a cache; ids [B, P]."""
    assert temperature == 0
    c, w = load(path)
    batch, prompt = ids.shape
    size = prompt + new
    eps = c["rms_norm_eps"]

    def forward(w, tokens, at, caches):
      length = tokens.shape[1]
      positions = at + jnp.arange(length)[None]
      mask = jnp.arange(size)[None, None] <= positions[..., None]
      x, after = w["embed_tokens"][tokens], []
      for block, cache in zip(w["layers"], caches):
        x, cache = layer(c, block, x, positions, mask, cache, at)
        after.append(cache)
      logits = norm(x[:, -1], w["norm"], eps) @ head(c, w)
      return logits.argmax(-1).astype(jnp.int32), after

    @jax.jit
    def run(w, ids):
      shape = (batch, size, c["num_key_value_heads"], c["head_dim"])
      caches = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in w["layers"]]
      token, caches = forward(w, ids, 0, caches)

      def one(carry, i):
        token, caches = carry
        following, caches = forward(w, token[:, None], prompt + i, caches)
        return (following, caches), token

      carry, tokens = jax.lax.scan(one, (token, caches), jnp.arange(new - 1))
      return jnp.concatenate([tokens.T, carry[0][:, None]], axis=1)

    clock, out = Clock(), None
    for _ in range(reps + 1):
      out = np.asarray(run(w, jnp.asarray(ids)))
      clock.tick()
    return {**clock.summary(skip=1), "tokens": out}

  def load(self, path: str) -> dict[str, Any]:
    """Reads the raw bytes of the weights: the limit of any loader."""
    import pathlib

    start = time.perf_counter()
    for file in pathlib.Path(path).glob("*.safetensors"):
      with open(file, "rb") as stream:
        while stream.read(2**24):
          pass
    return {"load_s": round(time.perf_counter() - start, 3)}
