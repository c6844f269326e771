"""BERT. Paper: arXiv 1810.04805."""

from __future__ import annotations

from typing import ClassVar

from pelton.models.bert_names import BERT
from pelton.models.encoder import Encoder


class Bert(Encoder):
    names: ClassVar = {"safetensors": BERT, "dummy": BERT}
