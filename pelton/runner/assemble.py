"""All wiring of one rank, in one readable order."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pelton.attention.backend import AttentionBackend
from pelton.attention.offload import KVOffload
from pelton.attention.table import BACKENDS
from pelton.attention.zeroing import NewBlockZeroing
from pelton.batch.block_tables import BlockTables
from pelton.batch.builder import BatchBuilder
from pelton.batch.input_buffers import InputBuffers
from pelton.batch.prompt_embeds import PromptEmbedRows
from pelton.batch.recurrent_states import RecurrentStates
from pelton.batch.row_state import RowState
from pelton.batch.staged import Staging, StagingStats
from pelton.batch.state_checkpoints import StateCheckpoints
from pelton.config.engine import EngineConfig
from pelton.core.descriptor import Descriptor
from pelton.core.kv.groups import group_layers, with_tables
from pelton.core.kv.spec import KVGroup
from pelton.device.protocol import Device
from pelton.forward.dispatch import Ladder
from pelton.forward.eager import EagerExecutor, allocate_buffers, as_live
from pelton.forward.executor import Executor
from pelton.forward.recorded import RecordedExecutor
from pelton.forward.stages import FirstStage, LaterStage, Link, Stage, WholeModel
from pelton.layers.context import Communicator, OneRank
from pelton.model_state.default import DefaultModelState
from pelton.model_state.segments import Segments
from pelton.models.protocol import Model
from pelton.ops.recurrent import needs_lengths
from pelton.runner.ends import make_end
from pelton.runner.heads.protocol import Head
from pelton.runner.heads.relay import RelayHead
from pelton.runner.heads.sample import SampleHead
from pelton.runner.memory import allocate_kv
from pelton.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlace:
    """Where a rank stands in a pipeline: layers lo:hi and its links to the neighbours."""

    lo: int
    hi: int
    previous: Link | None = None
    following: Link | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    runner: ModelRunner
    groups: tuple[KVGroup, ...]
    reserved_slot: int
    states: RecurrentStates
    offload: KVOffload
    executor: Executor
    kv_bytes: int
    staged: StagingStats


def attention_backend(config: EngineConfig) -> AttentionBackend:
    """The backend that the configuration names."""
    module, name = BACKENDS[config.attention_backend].split(":")
    return getattr(importlib.import_module(module), name)()  # type: ignore[no-any-return]


def assemble(
    config: EngineConfig,
    device: Device,
    model: Model,
    backend: AttentionBackend,
    *,
    place: PipelinePlace | None = None,
    communicator: Communicator | None = None,
    choose: Callable[[Descriptor], Descriptor] = as_live,
) -> Assembled:
    """A runner for `model`, whose weights are loaded and bound.

    choose: live shape -> executed shape, for executors or tests that pad; never beyond
        max_num_seqs rows and max_num_batched_tokens tokens.
    """
    dtype = getattr(torch, config.dtype)
    max_rows = config.scheduler.max_num_seqs
    max_tokens = config.scheduler.max_num_batched_tokens
    num_drafts = config.num_speculative_tokens
    communicator = communicator or OneRank()
    depth = config.scheduler.max_steps_in_flight
    layers = model.kv_layers(config.cache.block_size)
    groups = group_layers(layers, config.cache.checkpoint_interval)
    tabled = with_tables(groups)
    kept = groups[len(tabled) :]
    has_states = any(layer.recurrent is not None for layer in layers)
    assert kept or not (has_states and config.cache.enable_prefix_caching), (
        "a prefix hit would begin without recurrent state"
    )
    assert not has_states or not config.cache.num_host_pages, "no page would hold recurrent state"

    # Everything that is staged declares itself before the staging area gets its addresses.
    staging = Staging(device, depth)
    rows = RowState(
        staging,
        max_num_seqs=max_rows,
        max_model_len=config.max_model_len,
        num_drafts=num_drafts,
    )
    tables = BlockTables(staging, tabled, max_num_seqs=max_rows, max_model_len=config.max_model_len)
    buffers = InputBuffers(
        device,
        staging,
        "batch",
        max_rows=max_rows,
        max_tokens=max_tokens,
        rows_per_request=1 + num_drafts,
        table_widths=[-(-config.max_model_len // group.block_size) for group in tabled],
        block_sizes=tables.block_sizes,
    )
    embeds = PromptEmbedRows(
        device,
        is_enabled=config.enable_prompt_embeds,
        is_first=place is None or place.previous is None,
        max_tokens=max_tokens,
        hidden_size=config.model.hidden_size,
        dtype=dtype,
    )
    end = make_end(config, device, model, communicator, staging, rows)
    # One order for every hook. Who may refuse a row first: the others then never hear of it.
    participants = [embeds, *end.participants]
    checkpoints = StateCheckpoints(
        device, staging, max_num_seqs=max_rows, pages=sum(group.pages for group in kept)
    )
    if kept:
        # Before whatever writes to blocks: a checkpoint that is read may have their next owner.
        participants.append(checkpoints)
    # What is saved must be read before the next owner's blocks are zeroed.
    offload = KVOffload(device, staging, config.cache.num_host_pages)
    if config.cache.num_host_pages:
        participants.append(offload)
    zeroing = NewBlockZeroing(device, staging, config.cache.num_blocks, tables.block_sizes)
    if backend.reads_past_end:
        participants.append(zeroing)
    segments = Segments(device, staging, num_rows=rows.num_rows, max_tokens=max_tokens)
    if config.model.num_segments > 1:
        participants.append(segments)
    staging.allocate()

    row_tensors = rows.tensors(tables.tensors, tables.block_sizes, tables.windows)

    participants += end.connect(row_tensors, buffers)

    held = None if place is None else range(place.lo, place.hi)
    kv = allocate_kv(device, backend, layers, config.cache.num_blocks, held)
    pools = [pool for pool in kv if len(pool)]
    zeroing.pools = pools
    offload.allocate(pools)
    states = RecurrentStates(device, layers, num_rows=rows.num_rows, num_drafts=num_drafts)
    if kept:
        checkpoints.connect(layers, kv, states)
    model_state = DefaultModelState(
        device,
        config.model,
        backend,
        tabled,
        states,
        segments,
        dtype=dtype,
        max_tokens=max_tokens,
        max_model_len=config.max_model_len,
    )
    assert place is None or not num_drafts, "the first stage would not learn the last one's drafts"
    stage = _stage(device, model, embeds, place)
    builder = BatchBuilder(device, rows, tables, buffers)
    eager = EagerExecutor(
        device,
        model,
        model_state,
        stage,
        allocate_buffers(device, model.widths(), max_tokens, dtype),
        kv,
        states,
        communicator,
        choose,
        # Looked up at each call, as every step that this class has is.
        lambda batch: builder.launch(batch),
    )
    executor: Executor = eager
    if place is not None and place.following is not None:
        head: Head = RelayHead(device, row_tensors, max_rows=max_rows)
    else:
        head = end.head()
    if isinstance(head, SampleHead):
        reads_lengths = has_states and needs_lengths(dtype, device.torch_device.type)
        can_record = device.records_when_asked or (backend.refreshes_in_place and not reads_lengths)
        if not config.graphs.is_eager and can_record and place is None:
            executor = RecordedExecutor(
                device,
                eager,
                head,
                Ladder(
                    graphs=config.graphs,
                    query_lens=_uniform_lengths(device, num_drafts),
                    max_rows=max_rows,
                    max_tokens=max_tokens,
                    max_seq_len=config.max_model_len,
                ),
                lambda shape: builder.blank(shape, 1 + num_drafts),
            )
    runner = ModelRunner(
        staging=staging,
        rows=rows,
        tables=tables,
        builder=builder,
        executor=executor,
        head=head,
        participants=participants,
    )
    return Assembled(
        runner=runner,
        groups=groups,
        reserved_slot=rows.reserved_slot,
        states=states,
        offload=offload,
        executor=executor,
        staged=staging.stats,
        kv_bytes=sum(pool.nbytes for pool in {id(pool): pool for pool in pools}.values()),
    )


def _uniform_lengths(device: Device, num_drafts: int) -> tuple[int, ...]:
    """With fewer drafts than K in every row a step is rare: not worth a ladder where it costs."""
    if device.records_when_asked:
        return tuple(range(1, 2 + num_drafts))
    return tuple(sorted({1, 1 + num_drafts}))


def _stage(
    device: Device, model: Model, embeds: PromptEmbedRows, place: PipelinePlace | None
) -> Stage:
    if place is None:
        return WholeModel(device, model, embeds)
    if place.previous is None:
        assert place.following is not None, "a pipeline of one stage is no pipeline"
        return FirstStage(device, model, embeds, place.hi, place.following)
    return LaterStage(place.lo, place.hi, place.previous, place.following)
