"""RoBERTa and XLM-RoBERTa. Papers: arXiv 1907.11692, arXiv 1911.02116."""

from __future__ import annotations

from pelton.models.bert_names import ROBERTA, ROBERTA_CLASSIFIERS
from pelton.models.encoder import Encoder


class Roberta(Encoder):
    body = ROBERTA
    classifiers = ROBERTA_CLASSIFIERS
