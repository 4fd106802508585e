"""Ways to compare a student with its teacher."""

from tunix.distillation.strategies.base_strategy import BaseStrategy as BaseStrategy
from tunix.distillation.strategies.logit import LogitStrategy as LogitStrategy
