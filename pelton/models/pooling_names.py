"""Weight names of a checkpoint that is pooled. No torch."""

from __future__ import annotations

from dataclasses import replace

from pelton.checkpoint.name_map import NameRules, Rule

_BODY = "model."
_CLASSIFIER = (
    Rule("score.weight", "classifier.weight"),
    Rule("score.bias", "classifier.bias"),
)


def pooling_names(rules: NameRules) -> NameRules:
    """A family's rules, for its layers alone or with a classifier.

    A checkpoint of the layers alone (AutoModel, sentence-transformers) has their names without
    "model.". A head for tokens is left out, tied or not.
    """
    kept = [rule for rule in rules.rules if rule.target != "head.weight"]
    bare = [
        replace(rule, source=rule.source.removeprefix(_BODY))
        for rule in kept
        if rule.source.startswith(_BODY)
    ]
    heads = [rule.source for rule in rules.rules if rule.target == "head.weight"]
    ignored = [*rules.ignored, *(name.removeprefix(_BODY) for name in rules.ignored)]
    return NameRules(
        rules=(*kept, *bare, *_CLASSIFIER), ignored=tuple(dict.fromkeys([*ignored, *heads]))
    )
