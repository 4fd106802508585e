# How to install; make.py inserts this cell at `# %% include install`.

# %% [markdown]
# This notebook needs tunix and Jupyter. In a copy of the repository, run
# `pip install '.[notebooks]'`. On an NVIDIA GPU use `'.[notebooks,cuda]'` (CUDA 12:
# `cuda12`), and on a TPU `'.[notebooks,tpu]'`.
