"""Compatibility module: the old path of `tunix.data.questions`."""

from tunix.data.questions import get_dataset, get_train_and_eval_datasets

__all__ = ["get_dataset", "get_train_and_eval_datasets"]
