"""RoBERTa and XLM-RoBERTa. Papers: arXiv 1907.11692, arXiv 1911.02116."""

from __future__ import annotations

from typing import ClassVar

from pelton.models.bert_names import ROBERTA
from pelton.models.encoder import Encoder


class Roberta(Encoder):
    names: ClassVar = {"safetensors": ROBERTA, "dummy": ROBERTA}
