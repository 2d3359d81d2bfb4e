"""What the warm start learns from and is judged by: written solutions, some of them careless, and sampled responses.

Shape letters: B problems, T tokens of a padded row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase, Qwen3MoeForCausalLM
from transformers.integrations.moe import ExpertsInterface

from tracefp4.device import attention_for
from tracefp4.errors import TracefpError
from tracefp4.nn.dispatch import Dispatch, grouped_linear
from tracefp4.tasks import Prompt, SolvedTask, Task, ToolTask, score_all
from tracefp4.tasks.checks.base import usable_cores

IGNORED_LABEL = -100
MAX_NEW_TOKENS = 96
MAX_TURNS = 64


@runtime_checkable
class CarelessTask(Protocol):
    """A solved task that can also write a solution with one slip, whose answer is then wrong."""

    def flawed_solution(self, prompt: Prompt) -> str: ...


@runtime_checkable
class SolvedExchange(Protocol):
    """A solved task of several turns."""

    def solution_turns(self, prompt: Prompt, flawed: bool) -> list[str]:
        """The policy's turns; the environment's replies to them are ``respond``'s."""
        ...


class Teacher:
    """Writes solutions for the supervised batches, a share of them with a slip; a pure function of the prompt.

    Raises:
        TracefpError: the task writes no solutions, or no flawed ones where some are wanted.
    """

    def __init__(self, task: Task, mistake_share: float) -> None:
        self.task, self.mistake_share = task, mistake_share
        name = getattr(getattr(task, "config", None), "name", type(task).__name__)
        if isinstance(task, SolvedExchange):
            return
        if not isinstance(task, SolvedTask):
            raise TracefpError(f"task.name {name} writes no solutions that a warm start could learn from")
        if mistake_share and not isinstance(task, CarelessTask):
            raise TracefpError(f"optimizer.mistake_share must be 0: the task {name} writes no careless solutions")

    def solution(self, prompt: Prompt) -> str:
        """The solution of a task of one turn."""
        if self._careless(prompt):
            assert isinstance(self.task, CarelessTask)
            return self.task.flawed_solution(prompt)
        assert isinstance(self.task, SolvedTask)
        return self.task.solution(prompt)

    def turns(self, prompt: Prompt) -> list[str]:
        """The policy's turns; one where the task has one."""
        if isinstance(self.task, SolvedExchange):
            return self.task.solution_turns(prompt, self._careless(prompt))
        return [self.solution(prompt)]

    def _careless(self, prompt: Prompt) -> bool:
        return Random("careless" + prompt.text).random() < self.mistake_share


def supervised_batch(
    teacher: SolvedTask, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase
) -> dict[str, torch.Tensor]:
    """Right-padded rows of prompt + solution + end-of-sequence; of several turns, each ends so and its reply follows.

    Returns:
        ``input_ids``, ``attention_mask``, ``labels``: int64 [B, T]. Labels are ``IGNORED_LABEL`` on the
        prompt, on the environment's replies and on padding: the loss covers sampled tokens only, the end-of-sequence
        tokens included.
    """
    rows = _rows(teacher, prompts, tokenizer)
    lengths = torch.tensor([len(ids) for ids, _ in rows])[:, None]
    real = torch.arange(int(lengths.max())) < lengths
    written = torch.tensor([i for ids, _ in rows for i in ids])
    learned = torch.tensor([t for _, taught in rows for t in taught])
    input_ids = torch.full(real.shape, int(tokenizer.pad_token_id), dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED_LABEL)
    input_ids[real], labels[real] = written, torch.where(learned, written, IGNORED_LABEL)
    return {"input_ids": input_ids, "attention_mask": real.long(), "labels": labels}


Batch = dict[str, torch.Tensor]


class Batches(Dataset[Batch]):
    """Batches of the optimizer steps in their order. For a GPU they are made by processes beside the training, which
    would otherwise wait for them about as long as it computes."""

    WORKERS = 4

    def __init__(self, make: Callable[[int], Batch], device: str) -> None:
        self._make, self._workers = make, min(self.WORKERS, usable_cores()) if device == "cuda" else 0

    def __getitem__(self, step: int) -> Batch:
        return self._make(step)

    def of(self, steps: range) -> Iterator[tuple[int, Batch]]:
        """(step, its batch) of all ``steps``. Raises what ``make`` raises; of the first step at once."""
        if self._workers and steps:
            self._make(steps.start)
        loader = DataLoader(
            self,
            batch_size=None,
            sampler=steps,
            num_workers=self._workers,
            prefetch_factor=4 if self._workers else None,
            multiprocessing_context="fork" if self._workers else None,  # ``make`` holds what cannot be pickled
        )
        return zip(steps, loader, strict=True)


def _rows(
    teacher: SolvedTask, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], list[bool]]]:
    """(token ids, whether each is learned) of every prompt; all texts are encoded in one call."""
    parts = [_parts(teacher, prompt) for prompt in prompts]
    texts = [text for row in parts for text, _ in row]
    encoded = iter(tokenizer(texts).input_ids)
    rows = []
    for row in parts:
        ids, taught = list[int](), list[bool]()
        for _, learned in row:
            written = [*next(encoded), *([tokenizer.eos_token_id] if learned else [])]
            ids += written
            taught += [learned] * len(written)
        rows.append((ids, taught))
    return rows


def _parts(teacher: SolvedTask, prompt: Prompt) -> list[tuple[str, bool]]:
    """(text, whether the policy writes it): the prompt, then the policy's turns and the replies between them."""
    turns = teacher.turns(prompt) if isinstance(teacher, Teacher) else [teacher.solution(prompt)]
    parts = [(prompt.text, False)]
    for count, turn in enumerate(turns, start=1):
        parts.append((turn, True))
        if count < len(turns):
            assert isinstance(teacher, Teacher)
            assert isinstance(teacher.task, ToolTask)
            reply = teacher.task.respond(prompt, turns[:count])
            if reply is None:
                raise ValueError(f"the environment ends problem {prompt.id} before its solution does")
            parts.append((reply, False))
    return parts


def autocast(device: torch.device) -> torch.autocast:
    """Products in BF16 on a GPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


EXPERTS_NAME = "tracefp4-autocast"


def autocast_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Forward of an experts module in BF16, to which autocast takes all other products; hidden_states [N, H], index
    int64 and weights [N, K] -> [N, H]. transformers' own multiplies in FP32, which torch does expert by expert."""
    dispatch = Dispatch.of(top_k_index, self.num_experts)  # type: ignore[arg-type]
    x_MH = dispatch.scatter(hidden_states.bfloat16())
    gate_up, down = (self.get_parameter(name).bfloat16() for name in ("gate_up_proj", "down_proj"))
    gate, up = grouped_linear(x_MH, gate_up, dispatch.offsets_E).chunk(2, dim=-1)
    y_MH = grouped_linear(self.act_fn(gate) * up, down, dispatch.offsets_E)  # type: ignore[operator]
    return dispatch.gather(y_MH, top_k_weights.to(y_MH.dtype)).to(hidden_states.dtype)


ExpertsInterface.register(EXPERTS_NAME, autocast_experts)


@torch.inference_mode()
def sample_rows(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[int]],
    generator: torch.Generator,
    temperature: float = 1.0,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[list[int]]:
    """Sampled token ids behind each row, the end-of-sequence token included where it came; batched, with a KV cache.

    The plain transformers forward, for evaluating the warm start only: rollouts have their own engine.
    """
    pad, eos, device = int(tokenizer.pad_token_id), tokenizer.eos_token_id, model.device
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    # Left padding shifts the rows: positions count real tokens, as in training.
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    done = torch.zeros(len(rows), dtype=torch.bool, device=device)
    written: list[torch.Tensor] = []
    cache = None
    look_every = 8 if device.type == "cuda" else 1  # a look has the host wait for a GPU
    for step in range(max_new_tokens):
        with autocast(device), attention_for(device, 0):
            out = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
        cache = out.past_key_values
        probs = (out.logits[:, -1].float() / temperature).softmax(-1)
        token = torch.multinomial(probs, 1, generator=generator).masked_fill_(done[:, None], pad)
        written.append(token)
        done |= token[:, 0] == eos
        if step % look_every == look_every - 1 and done.all():
            break
        ids, positions = token, positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=-1)
    sampled = torch.cat(written, dim=-1).tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in sampled]


def sample_responses(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    seed: int,
    temperature: float = 1.0,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[str]:
    """One sampled response of one turn per prompt, decoded without special tokens."""
    generator = torch.Generator(model.device).manual_seed(seed)
    rows = [list(tokenizer(prompt.text).input_ids) for prompt in prompts]
    sampled = sample_rows(model, tokenizer, rows, generator, temperature, max_new_tokens)
    return tokenizer.batch_decode(sampled, skip_special_tokens=True)


def sample_exchanges(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: ToolTask,
    prompts: list[Prompt],
    seed: int,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[list[str]]:
    """The policy's turns for each prompt. A turn without its end ends the exchange, as it does in a rollout."""
    generator = torch.Generator(model.device).manual_seed(seed)
    rows: dict[int, list[int]] = {i: list(tokenizer(p.text).input_ids) for i, p in enumerate(prompts)}
    turns: list[list[str]] = [[] for _ in prompts]
    for _ in range(MAX_TURNS):
        if not rows:
            break
        open_now = list(rows)
        sampled = sample_rows(model, tokenizer, list(rows.values()), generator, 1.0, max_new_tokens)
        for i, ids in zip(open_now, sampled, strict=True):
            row = rows.pop(i)
            if ids[-1] != tokenizer.eos_token_id:
                continue
            turns[i].append(str(tokenizer.decode(ids, skip_special_tokens=True)))
            reply = task.respond(prompts[i], turns[i])
            if reply is not None:
                rows[i] = [*row, *ids, *tokenizer(reply).input_ids]
    return turns


def pass_rate(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    n: int,
    seed: int,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> tuple[float, float]:
    """Share of ``n`` held-out problems solved by one sample each, and the mean length of what the policy wrote."""
    model.eval()
    prompts = task.test_prompts(n)
    last: list[str] = []
    length = 0
    together = 1024 if model.device.type == "cuda" else 256  # on a GPU a step of more takes hardly longer
    for start in range(0, n, together):
        part, part_seed = prompts[start : start + together], seed + start
        if isinstance(task, ToolTask):
            exchanges = sample_exchanges(model, tokenizer, task, part, part_seed, max_new_tokens)
            length += sum(len(turn) for turns in exchanges for turn in turns)
            last += [turns[-1] if turns else "" for turns in exchanges]
        else:
            texts = sample_responses(model, tokenizer, part, part_seed, 1.0, max_new_tokens)
            length += sum(map(len, texts))
            last += texts
    return sum(score_all(task, prompts, last)) / n, length / n


def save_progress(path: Any, content: dict[str, Any]) -> None:
    """Writes tensors and plain values so that a reader finds the old file or the new one."""
    staging = path.with_name(path.name + ".new")
    torch.save(content, staging)
    staging.replace(path)
