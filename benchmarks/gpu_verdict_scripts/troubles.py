"""Training functions for one GPU with one thing wrong each, and healthy ones."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset

import powertrain
from powertrain import Checkpoint

DEVICE = "cuda"


@dataclass(frozen=True)
class Trouble:
    """A training function, and the kinds of which its first finding must be one; () for a healthy run."""

    train: Callable[[], None]
    kinds: tuple[str, ...]
    #: A part of the line of code that the evidence must name; "" for none.
    line: str = ""

    @property
    def name(self) -> str:
        return self.train.__name__


class Attention(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, within: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.within = within
        self.heads = max(1, width // 64)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        if self.within is not None:
            self.within()
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """A small language model; ``between`` is called with the activations after each block, ``within`` in each."""

    def __init__(
        self,
        width: int,
        layers: int,
        between: Callable[[torch.Tensor], Any] | None = None,
        within: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(8192, width)
        self.blocks = nn.ModuleList(Attention(width, within) for _ in range(layers))
        self.head = nn.Linear(width, 8192)
        self.between = between

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            if self.between is not None:
                self.between(x)
        return self.head(x)


def tokens_of(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 8192, (batch, length + 1), device=DEVICE)


def train_gpt(
    steps: int = 100,
    *,
    width: int = 1024,
    layers: int = 8,
    batch: int = 24,
    length: int = 512,
    between: Callable[[torch.Tensor], Any] | None = None,
    within: Callable[[], Any] | None = None,
    after: Callable[[int, torch.Tensor], Any] | None = None,
    batches: Iterator[torch.Tensor] | None = None,
    compiled: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    seconds: float = 0.0,
    half: bool = True,
) -> None:
    """Train for some steps, or for some seconds where they are given."""
    model = Gpt(width, layers, between, within).to(DEVICE)
    called = model if compiled is None else torch.compile(model, **compiled)
    update = torch.optim.AdamW(
        model.parameters(), lr=1e-4, **({"fused": True} if optimizer is None else optimizer)
    )
    given = tokens_of(batch, length)
    until = time.monotonic() + seconds
    number = 0
    while number < steps or time.monotonic() < until:
        part = given if batches is None else next(batches)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            logits = called(part[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())
        loss.backward()
        update.step()
        update.zero_grad(set_to_none=True)
        if after is not None:
            after(number, loss)
        number += 1
        if number % 50 == 0:
            powertrain.report({"step": number})


# --------------------------------------------------------------------------- a host that is too slow


def small_kernels() -> None:
    train_gpt(width=256, layers=12, batch=4, length=64)


def tiny_batches_of_a_deep_model() -> None:
    train_gpt(width=128, layers=48, batch=1, length=32)


def many_small_operators() -> None:
    model = nn.Linear(64, 64).to(DEVICE)
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(32, 64, device=DEVICE)
    for number in range(150):
        y = model(x)
        for _ in range(200):
            y = (y * 1.01 + 0.1).tanh()
        y.square().mean().backward()
        update.step()
        update.zero_grad()
        if number % 50 == 49:
            powertrain.report({"step": number})


def item_in_every_layer() -> None:
    train_gpt(
        width=768, layers=12, batch=8, length=256, between=lambda x: x.float().mean().item()
    )  # waits here


def copy_to_the_host_in_every_layer() -> None:
    train_gpt(width=768, layers=12, batch=8, length=256, between=lambda x: x[:, :4].cpu())  # waits here


def mask_in_every_layer() -> None:
    train_gpt(width=768, layers=12, batch=8, length=256, between=lambda x: x[x > 3].numel())  # waits here


def loss_of_every_step_is_printed_and_checked() -> None:
    def check(number: int, loss: torch.Tensor) -> None:
        for part in (loss, loss * 2, loss * 3, loss * 4, loss * 5, loss * 6, loss * 7, loss * 8):
            if not torch.isfinite(part).item():  # waits here
                raise SystemExit("diverged")

    train_gpt(width=512, layers=8, batch=16, length=128, after=check)


# --------------------------------------------------------------------------- memory


def memory_kept_in_every_step() -> None:
    kept = []

    def keep(number: int, loss: torch.Tensor) -> None:
        kept.append(torch.empty(3 << 20, device=DEVICE))  # kept here

    train_gpt(250, after=keep)


def outputs_kept_in_a_list() -> None:
    kept: list[torch.Tensor] = []
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(12))).to(DEVICE)
    update = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(8192, 4096, device=DEVICE)
    for number in range(150):
        with torch.autocast(DEVICE, torch.bfloat16):
            out = model(x)
        loss = out.float().square().mean()
        loss.backward()
        update.step()
        update.zero_grad()
        kept.append(out[:64].detach() if number < 10 else out[:2048].float())  # kept here
        if number % 50 == 49:
            powertrain.report({"step": number})


def memory_in_pieces() -> None:
    # Each batch is longer than all before, so that no piece of memory fits again. cuDNN's attention would build a plan
    # for each length, which takes much longer than getting memory does.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        train_gpt(100, batches=(tokens_of(32, 256 + 3 * number) for number in itertools.count()))


def memory_nearly_full() -> None:
    train_gpt(5, batch=64)  # torch keeps the memory of these steps for the others
    free, _ = torch.cuda.mem_get_info()
    kept = torch.empty(free - (3 << 30), dtype=torch.uint8, device=DEVICE)
    train_gpt(batch=64, seconds=6.0)
    del kept


# --------------------------------------------------------------------------- slow forms


def optimizer_of_single_tensors() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(200))).to(DEVICE, torch.bfloat16)
    update = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    x = torch.randn(8192, 512, device=DEVICE, dtype=torch.bfloat16)
    for number in range(100):
        model(x).float().square().mean().backward()
        update.step()
        update.zero_grad()
        if number % 50 == 49:
            powertrain.report({"step": number})


def products_of_full_floats() -> None:
    train_gpt(60, half=False)


def lengths_that_change_under_the_compiler() -> None:
    lengths = (64, 72, 80, 88, 96, 104, 112, 120)

    def batches() -> Iterator[torch.Tensor]:
        number = 0
        while True:
            yield tokens_of(16, lengths[number // 16 % len(lengths)])
            number += 1

    train_gpt(140, width=256, layers=2, batches=batches(), compiled={"dynamic": False})


def a_plan_for_each_length() -> None:
    # cuDNN builds one on the host for each length that is new.
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        train_gpt(100, batches=(tokens_of(12, 64 + 5 * number) for number in itertools.count()))


def graphs_that_break() -> None:
    def look() -> None:
        print(end="")

    train_gpt(width=256, layers=8, batch=4, length=64, within=look, compiled={})


# --------------------------------------------------------------------------- the way of a batch


class Slow(Dataset[torch.Tensor]):
    """Samples that take a while to make."""

    def __init__(self, seconds: float, length: int = 256, shape: tuple[int, ...] = ()) -> None:
        self.seconds, self.length, self.shape = seconds, length, shape

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            pass
        return torch.randint(0, 8192, (self.length + 1,))


def loader_in_the_loop() -> None:
    loader = DataLoader(Slow(0.004), batch_size=16)
    batches = (part.to(DEVICE) for part in loader)
    train_gpt(width=512, layers=6, batches=batches, length=256)


def loader_with_one_worker() -> None:
    loader = DataLoader(Slow(0.004), batch_size=16, num_workers=1)
    batches = (part.to(DEVICE) for part in loader)
    train_gpt(width=512, layers=6, batches=batches, length=256)


def pageable_copies() -> None:
    model = nn.Sequential(nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(DEVICE)
    update = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    given = [torch.randn(16384, 4096) for _ in range(2)]
    for number in range(100):
        x = given[number % 2].to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        update.step()
        update.zero_grad()
        if number % 50 == 49:
            powertrain.report({"step": number})


# --------------------------------------------------------------------------- beside the model


def work_between_steps() -> None:
    train_gpt(after=lambda number, loss: time.sleep(0.03))


def files_saved_in_every_step() -> None:
    state = {"weights": torch.randn(8 << 20)}

    def save(number: int, loss: torch.Tensor) -> None:
        with powertrain.checkpoint_dir() as directory:
            torch.save(state, f"{directory}/state.pt")
            powertrain.report({"step": number}, checkpoint=Checkpoint.from_directory(directory))

    train_gpt(80, width=512, layers=6, batch=16, length=256, after=save)


# --------------------------------------------------------------------------- healthy runs


def healthy_large() -> None:
    train_gpt(100)


def healthy_large_for_20_seconds() -> None:
    train_gpt(100, seconds=20.0)


def healthy_compiled() -> None:
    train_gpt(100, compiled={})


def healthy_small_with_graphs() -> None:
    train_gpt(300, width=512, layers=4, batch=32, length=256, compiled={"mode": "reduce-overhead"})


def healthy_with_a_loader() -> None:
    loader = DataLoader(Slow(0.0, 512), batch_size=24, num_workers=4, pin_memory=True)
    train_gpt(batches=(part.to(DEVICE, non_blocking=True) for part in loader))


def healthy_convolutions() -> None:
    layers: list[nn.Module] = []
    for number in range(12):
        layers += [nn.Conv2d(3 if number == 0 else 128, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU()]
    model = nn.Sequential(*layers).to(DEVICE, memory_format=torch.channels_last)
    update = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    x = torch.randn(128, 3, 64, 64, device=DEVICE).to(memory_format=torch.channels_last)
    for number in range(100):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        update.step()
        update.zero_grad()
        if number % 50 == 49:
            powertrain.report({"step": number})


def healthy_loss_read_now_and_then() -> None:
    def look(number: int, loss: torch.Tensor) -> None:
        if number % 20 == 0:
            powertrain.report({"loss": loss.item()})

    train_gpt(120, after=look)


TROUBLES = (
    Trouble(small_kernels, ("launch_bound",)),
    Trouble(tiny_batches_of_a_deep_model, ("launch_bound",)),
    Trouble(many_small_operators, ("launch_bound",)),
    Trouble(item_in_every_layer, ("sync_bound",), "in <lambda>"),
    Trouble(copy_to_the_host_in_every_layer, ("sync_bound",), "in <lambda>"),
    Trouble(mask_in_every_layer, ("sync_bound",), "in <lambda>"),
    Trouble(loss_of_every_step_is_printed_and_checked, ("sync_bound",), "in check"),
    Trouble(memory_kept_in_every_step, ("device_memory_creep",), "in keep"),
    Trouble(outputs_kept_in_a_list, ("device_memory_creep",), "in outputs_kept"),
    Trouble(memory_in_pieces, ("fragmented_memory",)),
    Trouble(memory_nearly_full, ("memory_pressure",)),
    Trouble(optimizer_of_single_tensors, ("unfused_optimizer",)),
    Trouble(products_of_full_floats, ("full_float_products",)),
    Trouble(lengths_that_change_under_the_compiler, ("recompiles",)),
    Trouble(a_plan_for_each_length, ("host_bound",)),
    Trouble(graphs_that_break, ("graph_breaks",)),
    Trouble(loader_in_the_loop, ("input_bound",)),
    Trouble(loader_with_one_worker, ("input_bound",)),
    Trouble(pageable_copies, ("transfer_bound",)),
    Trouble(work_between_steps, ("outside_bound",)),
    Trouble(files_saved_in_every_step, ("checkpoint_bound",)),
    Trouble(healthy_large, ()),
    Trouble(healthy_large_for_20_seconds, ()),
    Trouble(healthy_compiled, ()),
    Trouble(healthy_small_with_graphs, ()),
    Trouble(healthy_with_a_loader, ()),
    Trouble(healthy_convolutions, ()),
    Trouble(healthy_loss_read_now_and_then, ()),
)
BY_NAME = {trouble.name: trouble for trouble in TROUBLES}
