"""ModernBERT. Paper: arXiv 2412.13663."""

from __future__ import annotations

from pelton.models.encoder import Encoder
from pelton.models.modernbert_names import MODERNBERT, MODERNBERT_CLASSIFIERS


class ModernBert(Encoder):
    body = MODERNBERT
    classifiers = MODERNBERT_CLASSIFIERS
