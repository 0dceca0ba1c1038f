"""One thread a process: the models are tiny, and the suite runs on as many processes as there are cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
