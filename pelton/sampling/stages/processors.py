"""Functions of the user's."""

import logging

import torch

from pelton.sampling.processors import ProcessedRow
from pelton.sampling.tile import Tile

_logger = logging.getLogger("pelton")


def processors(tile: Tile) -> None:
    """One row at a time. A processor that raises, or that returns what it should have written,
    ends its own request: the row is noted in `tile.failed_rows`."""
    history, prompt_len, num_tokens = tile.history(), tile.prompt_len(), tile.positions + 1
    place = torch.arange(history.shape[1], device=history.device)
    known = torch.where(place < num_tokens[:, None], history, -1).clamp_(min=-1)
    for index, functions in tile.span.processors:
        row = ProcessedRow(known[index], prompt_len[index], num_tokens[index])
        try:
            for function in functions:
                if function(tile.scores[index], row) is not None:
                    raise TypeError("it must change scores in place and return None")
        except Exception as error:
            _logger.warning("a logits processor failed: %r", error, exc_info=error)
            tile.failed_rows.append(index)
