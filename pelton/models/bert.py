"""BERT. Paper: arXiv 1810.04805."""

from __future__ import annotations

from pelton.models.bert_names import BERT, BERT_CLASSIFIERS
from pelton.models.encoder import Encoder


class Bert(Encoder):
    body = BERT
    classifiers = BERT_CLASSIFIERS
