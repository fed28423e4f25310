"""What several ranks compute: run as a script with the number of ranks and a folder for results.

Every cell is a function of a mesh and returns values; rank 0 saves them, or the error's text.
"""

import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from pt2e_quant import training
from pt2e_quant.core.granularity import PerGroup, PerTensor
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.tensors import QuantizedTensor, quantize_
from pt2e_quant.training import Float8TrainingConfig
from pt2e_quant.training.optimizers.low_bit_optimizers import local_of
from pt2e_quant.training.stored_parameters import StoredParameter

CONFIGS = {
    "tensorwise": Float8TrainingConfig(),
    "rowwise": Float8TrainingConfig(scaling="rowwise"),
    "blockwise": Float8TrainingConfig(scaling="blockwise"),
    "delayed": Float8TrainingConfig(amax_history=2),
    "gathered": Float8TrainingConfig(float8_all_gather=True),
}
ADAM = torch.optim.AdamW
STEPS = 3
RANKS = 4
"""Parts of a batch, on so many ranks or one after the other."""


class Block(nn.Module):
    """Hidden sizes that four ranks cannot share evenly by rows of FSDP2, but by heads of TP."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 264)
        self.down = nn.Linear(264, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, 7)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(convert=None):
    torch.manual_seed(0)
    model = Net()
    if convert is not None:
        convert(model)
    return model


def float8(name):
    return lambda model: training.convert_to_float8_training(model, CONFIGS[name])


def sharded_float8(name):
    """As `float8`; emulated on a CPU with AMX, where the kernel's sums depend on a shard's size.

    A sum that is rounded otherwise falls on another float8 code now and then, which is no longer
    within float32's rounding.
    """
    config = CONFIGS[name]
    if torch.cpu._is_amx_tile_supported():
        config = config.emulated()
    return lambda model: training.convert_to_float8_training(model, config)


def int8(model):
    config = training.Int8TrainingConfig(grad_rounding="nearest")
    training.convert_to_int8_training(model, config)


def stored(scheme, ends=("up", "down", "head"), **named):
    """Weights as codes; groups of 32 fit the first weight of a block alone."""
    return lambda model: training.quantize_parameters(
        model, scheme, filter=lambda module, name: name.endswith(ends), **named
    )


def per_tensor():
    weight = scheme_named("w8").weight
    return replace(weight, granularity=PerTensor())


def four_bits(size=32):
    """Codes from -7: from -8 the least value of a group is on a tie, which sums decide."""
    weight = scheme_named("w4_g32").weight
    return replace(weight, granularity=PerGroup(size), quant_min=-7)


def with_masters(params, lr):
    return training.with_master_weights(ADAM, [{"params": list(params)}], lr=lr)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2 * RANKS, 32, generator=generator) for _ in range(STEPS)]


def train(model, parts, optimizer_class):
    """Losses of steps in which a batch comes in parts, whose gradients are averaged."""
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    losses = []
    for batch in parts:
        loss = 0.0
        for part in batch:
            own = model(part).square().mean() / len(batch)
            own.backward()
            loss += own.detach()
        optimizer.step()
        optimizer.zero_grad()
        if any("float8_scales" in name for name, _ in model.named_buffers()):
            training.update_float8_scales(model)
        losses.append(loss)
    return torch.stack(losses), optimizer


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def replicate(model, mesh):
    return DistributedDataParallel(model)


def run_parts(mesh, convert, optimizer_class, wrap=shard):
    """Each rank has a part of the batch; alone, the parts follow each other."""
    count = mesh.size()
    alone = [batch.chunk(count) for batch in batches()]
    own = [[parts[mesh.get_rank()]] for parts in alone]
    expected, _ = train(make(convert), alone, optimizer_class)
    model = wrap(make(convert), mesh)
    found, _ = train(model, own, optimizer_class)
    dist.all_reduce(found)
    return {"expected": expected, "found": found / count, "stored": kinds(model)}


def kinds(model):
    """Layouts and counts of quantizations of the shards that are stored as codes."""
    shards = map(local_of, model.parameters())
    stored = [own for own in shards if isinstance(own, StoredParameter)]
    return {(own.form.layout, own.requantizations) for own in stored}


def parallelize(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def run_tensor_parallel(mesh, convert, optimizer_class):
    parts = [[batch] for batch in batches()]
    expected, _ = train(make(convert), parts, optimizer_class)
    model = parallelize(make(convert), mesh)
    found, _ = train(model, parts, optimizer_class)
    return {"expected": expected, "found": found, "stored": kinds(model)}


def run_quantized(mesh, scheme, ends):
    """Outputs of a module whose weights were quantized before they were shared."""

    def quantized():
        model = make().eval()
        quantize_(model, scheme, filter=lambda _, name: name.endswith(ends), layout="plain")
        return model

    expected = quantized()(batches()[0])
    model = parallelize(quantized(), mesh)
    for name, weight in model.blocks.named_parameters():
        if name.endswith(tuple(f"{end}.weight" for end in ends)):
            assert type(local_of(weight)) is QuantizedTensor, name
            assert local_of(weight).numel() * mesh.size() == weight.numel()
    found = model(batches()[0])
    return {"expected": expected.flatten(), "found": found.flatten(), "stored": kinds(model)}


def run_both(mesh, convert, optimizer_class):
    """FSDP2 on two groups of ranks, which share the heads of tensor parallelism."""
    square = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("data", "tensor"))
    data = square["data"]
    expected, _ = train(make(convert), [[batch] for batch in batches()], optimizer_class)
    model = shard(parallelize(make(convert), square["tensor"]), data)
    own = [[batch.chunk(2)[data.get_local_rank()]] for batch in batches()]
    found, _ = train(model, own, optimizer_class)
    dist.all_reduce(found)
    return {"expected": expected, "found": found / mesh.size(), "stored": kinds(model)}


def whole(state):
    """A nested state with full tensors, the same on all ranks."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        state = state.full_tensor()
    real = getattr(state, "real_values", state)
    if isinstance(real, QuantizedTensor):
        real = real.dequantize()
    return real.detach().clone() if isinstance(real, torch.Tensor) else real


def states_of(model, optimizer):
    own, of_optimizer = get_state_dict(model, optimizer)
    return {"model": own, "optimizer": of_optimizer}


def run_save(mesh, convert, optimizer_class, folder):
    """Train, save, and load into a model that is not sharded."""
    parts = [[batch.chunk(mesh.size())[mesh.get_rank()]] for batch in batches()]
    model = shard(make(convert), mesh)
    _, optimizer = train(model, parts, optimizer_class)
    states = states_of(model, optimizer)
    dcp.save(states, checkpoint_id=folder)
    expected = whole(states)
    if mesh.get_rank() == 0:
        torch.save(expected, f"{folder}/whole.pt")
    return {"expected": expected, "found": load(make(convert), optimizer_class, folder)}


def run_load(mesh, convert, optimizer_class, folder):
    """Load what another number of ranks saved."""
    found = load(shard(make(convert), mesh), optimizer_class, folder)
    return {"expected": torch.load(f"{folder}/whole.pt"), "found": found}


def load(model, optimizer_class, folder):
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    states = states_of(model, optimizer)
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    return whole(states_of(model, optimizer))


CELLS = {
    **{f"fsdp {name}": (run_parts, float8(name), ADAM) for name in CONFIGS},
    **{f"tp {name}": (run_tensor_parallel, sharded_float8(name), ADAM) for name in CONFIGS},
    "fsdp int8": (run_parts, int8, ADAM),
    "tp int8": (run_tensor_parallel, int8, ADAM),
    "fsdp stored": (run_parts, stored("w8"), with_masters),
    "fsdp stored w4": (run_parts, stored(four_bits(), ("up", "head")), with_masters),
    "fsdp stored fp8": (run_parts, stored("fp8_weight_only"), with_masters),
    "fsdp tp stored": (run_both, stored("w8"), with_masters),
    "fsdp stored per tensor": (run_parts, stored(per_tensor()), with_masters),
    "fsdp stored grad_dtype": (run_parts, stored("w8", grad_dtype=torch.bfloat16), with_masters),
    "ddp stored": (run_parts, stored("w8"), with_masters, replicate),
    "ddp int8": (run_parts, int8, ADAM, replicate),
    "ddp AdamW8bit": (run_parts, None, training.AdamW8bit, replicate),
    "tp stored": (run_tensor_parallel, stored("w8"), with_masters),
    "tp stored w4": (run_tensor_parallel, stored(four_bits(), ("up",)), with_masters),
    "tp stored grad_dtype": (
        run_tensor_parallel,
        stored("w8", grad_dtype=torch.bfloat16),
        with_masters,
    ),
    "tp stored per tensor": (run_tensor_parallel, stored(per_tensor()), with_masters),
    "tp stored cut": (run_tensor_parallel, stored(four_bits(88), ("down",)), with_masters),
    "tp quantized w8": (run_quantized, "w8", ("up", "down")),
    "tp quantized w4": (run_quantized, "w4_g32", ("up",)),
    "tp quantized int8_dynamic": (run_quantized, "int8_dynamic", ("up",)),
    "fsdp AdamW8bit": (run_parts, None, training.AdamW8bit),
    "fsdp AdamW4bit": (run_parts, None, training.AdamW4bit),
    "tp AdamW8bit": (run_tensor_parallel, None, training.AdamW8bit),
    "tp SGD4bit": (run_tensor_parallel, None, training.SGD4bit),
}
SAVED = {
    "float8 gathered": (float8("gathered"), ADAM),
    "float8 delayed": (float8("delayed"), ADAM),
    "AdamW8bit": (None, training.AdamW8bit),
    "AdamW4bit": (None, training.AdamW4bit),
    "stored": (stored("w8"), with_masters),
    "stored w4": (stored(four_bits(), ("up", "head")), with_masters),
}


def cells(mesh, folder):
    for name, (run, *how) in CELLS.items():
        yield name, lambda run=run, how=how: run(mesh, *how)
    for name, how in SAVED.items():
        at = f"{folder}/{name.replace(' ', '_')}"
        run = run_load if Path(at).exists() else run_save
        kind = "load" if Path(at).exists() else "save"
        yield f"{kind} {name}", lambda run=run, how=how, at=at: run(mesh, *how, at)


def work(rank, count, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{count}", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    results = {}
    planned = list(cells(mesh, folder))
    dist.barrier()
    for name, run in planned:
        try:
            results[name] = run()
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            if rank == 0:
                traceback.print_exc(limit=-4)
    if rank == 0:
        torch.save(results, f"{folder}/results{count}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, place = int(sys.argv[1]), sys.argv[2]
    torch.multiprocessing.spawn(work, (ranks, place), nprocs=ranks)
