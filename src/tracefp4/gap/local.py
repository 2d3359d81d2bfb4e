"""Forms that run on this machine: transformers models, rounded or not, and this package's rollout engine."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LogitsProcessor
from transformers.utils import logging as transformers_logging

from tracefp4.device import resolve_device
from tracefp4.errors import TracefpError
from tracefp4.gap.answers import Answer, Sampling
from tracefp4.gap.forms import LocalForm, stored_quantization
from tracefp4.gap.quantize import check_inputs, quantize_linears
from tracefp4.nn.loading import (
    check_vocabulary,
    check_weights,
    load_policy,
    read_config,
    read_headers,
    read_tokenizer,
)
from tracefp4.recipe import QuantRecipe
from tracefp4.rollout.config import RolloutConfig
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.rollout.sampler import sample
from tracefp4.tasks.base import Message
from tracefp4.types import Request, SamplingParams

PACKAGES = {"compressed-tensors": "compressed_tensors", "gguf": "gguf", "accelerate": "accelerate"}
SCORED_ELEMENTS = 1 << 26
"""Logits of one scoring forward: 256 MiB in FP32."""


class Runner(Protocol):
    """A form that is loaded."""

    about: dict[str, Any]
    """What the report says of it: dtype, device, layers rounded."""

    def encode(self, messages: Sequence[Message]) -> list[int]: ...

    def limit(self) -> int:
        """Prompt and answer together, in tokens."""
        ...

    def generate(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[Answer]: ...


def load_runner(form: LocalForm, sampling: Sampling, device: str, dtype: str, batch_size: int) -> Runner:
    """Loads a form. Raises TracefpError for what is missing or cannot be read: files, packages, memory for it."""
    if form.kind == "engine":
        return EngineRunner(form, sampling, device, dtype, batch_size)
    return TransformersRunner(form, sampling, device, dtype)


def check_local(form: LocalForm, sampling: Sampling, device: str, dtype: str) -> None:
    """What shows without the weights: device, packages, tokenizer and template, heads of the weight files.

    Raises TracefpError as ``load_runner`` would, which for the second form is hours of answers later.
    """
    resolve_device(device, "--device")
    Encoder(form, sampling.chat)
    if form.kind == "engine":
        _engine_of(form, read_config(form.path), _engine_dtype(form, dtype), 1, 2, "meta")
        check_weights(form.path, read_config(form.path))
    elif form.kind != "gguf":
        if stored_quantization(form.path) == "compressed-tensors":
            _require("compressed-tensors", form)
        if not any(form.path.glob("*.bin")):
            read_headers(form.path)
        if form.weights and form.activations:
            with _quiet():
                check_inputs(_config(form, {"pretrained_model_name_or_path": str(form.path)}), form.weights)


class Encoder:
    """Inquiries to token ids, by the form's own tokenizer. Raises TracefpError where it cannot be read."""

    def __init__(self, form: LocalForm, chat: str) -> None:
        source: dict[str, Any] = {"pretrained_model_name_or_path": str(form.path)}
        if form.kind == "gguf":
            _require("gguf", form)
            source = {"pretrained_model_name_or_path": str(form.path.parent), "gguf_file": form.path.name}
        else:
            check_vocabulary(form.path)
        with _quiet():
            try:
                self.tokenizer = AutoTokenizer.from_pretrained(**source, local_files_only=True)
            except Exception as error:  # tokenizers raises plain Exception, transformers KeyError and others
                raise TracefpError(f"the tokenizer of {form.text} cannot be read: {_one_line(error)}") from error
        self.form = form
        has_template = getattr(self.tokenizer, "chat_template", None) is not None
        if chat == "on" and not has_template:
            raise TracefpError(f"the tokenizer of {form.text} has no chat template, which --chat on requires")
        self.chat = has_template and chat != "off"

    def __call__(self, messages: Sequence[Message]) -> list[int]:
        """At least one token id. Raises TracefpError where the template or the tokenizer refuses."""
        try:
            if self.chat:
                text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
            else:
                text = "\n\n".join(m["content"] for m in messages)
            ids = self.tokenizer(text, add_special_tokens=not self.chat)["input_ids"]
        except Exception as error:  # a template is a program
            raise TracefpError(f"the tokenizer of {self.form.text} refuses a prompt: {_one_line(error)}") from None
        if not ids:
            raise TracefpError(f"the tokenizer of {self.form.text} turns a prompt into nothing")
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def stops(self, *configs: Any) -> list[int]:
        """Token ids that end an answer: of the configs, and the tokenizer's, which GGUF files may have wrong."""
        listed: list[Any] = [self.tokenizer.eos_token_id]
        for config in configs:
            eos = getattr(config, "eos_token_id", None)
            listed += eos if isinstance(eos, list | tuple) else [eos]
        return sorted({int(token) for token in listed if token is not None})


class TransformersRunner:
    """Any causal language model, by transformers."""

    def __init__(self, form: LocalForm, sampling: Sampling, device: str, dtype: str) -> None:
        self.form, self.sampling = form, sampling
        self.device = resolve_device(device, "--device")
        self.encode = Encoder(form, sampling.chat)
        self.model = _load(form, self.device, dtype)
        self.stops = self.encode.stops(self.model.generation_config, self.model.config)
        # The checkpoint's own settings (a repetition penalty, say) would change one form and not an endpoint.
        self.model.generation_config = GenerationConfig()
        self.about = {
            "device": self.device,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "chat": self.encode.chat,
        }
        if form.weights:
            done = quantize_linears(self.model, form.weights, form.activations)
            self.about["rounded"] = {
                "layers": done.layers,
                "share_of_weights": done.weights / done.all_weights,
                "skipped": done.skipped,
            }

    def limit(self) -> int:
        config = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or 1 << 30)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[Answer]:
        """One answer a prompt, decoded together; each draws by its own seed and position, as the rollout engine does.

        Raises TracefpError where the model's logits are not finite or memory is too small.
        """
        s, width = self.sampling, max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left: all rows decode at the right edge
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        new = min(s.max_new_tokens, self.limit() - width)
        params = [SamplingParams(s.temperature, s.top_p, s.max_new_tokens, seed=seed) for seed in seeds]
        draw = _Draw(params, torch.tensor([len(p) for p in prompts]))
        config = GenerationConfig(
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=self.stops or None,
            pad_token_id=self.stops[0] if self.stops else 0,
        )
        started = time.perf_counter()
        with _quiet(), _model_errors(self.form):
            self.model.generate(
                inputs=ids.to(self.device),
                attention_mask=mask.to(self.device),
                generation_config=config,
                logits_processor=[draw],
            )
        seconds = time.perf_counter() - started
        tokens, logprobs = draw.drawn()
        return [
            self._answer(prompt, row, lp, seconds)
            for prompt, row, lp in zip(prompts, tokens.tolist(), logprobs.tolist(), strict=True)
        ]

    def _answer(self, prompt: list[int], row: list[int], logprobs: list[float], seconds: float) -> Answer:
        return finished(self.encode, self.stops, prompt, row, logprobs, seconds)

    @torch.inference_mode()
    def score(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> list[list[float]]:
        """Log-probs, temperature 1, of given answers under this form: one forward over prompt and answer together."""
        found: list[list[float]] = []
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        for prompt, response in zip(prompts, responses, strict=True):
            ids = torch.tensor([prompt + response], device=self.device)
            kept = len(response) + 1  # the last logits of the prompt predict the first token of the answer
            with _model_errors(self.form):
                hidden = self.model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0, -kept:-1]
            target = ids[0, len(prompt) :]
            step = max(1, SCORED_ELEMENTS // vocabulary)
            parts = [
                torch.log_softmax(hidden[i : i + step].float(), -1).gather(-1, target[i : i + step, None])[:, 0]
                for i in range(0, len(response), step)
            ]
            found.append(torch.cat(parts).tolist() if parts else [])
        return found


class _Draw(LogitsProcessor):
    """Draws each token itself and leaves transformers' loop no choice: both forms draw alike from like logits."""

    def __init__(self, params: Sequence[SamplingParams], lengths: Tensor) -> None:
        self.params, self.lengths = list(params), lengths
        self.greedy = all(p.temperature == 0 for p in params)
        self.ids: list[Tensor] = []
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = torch.log_softmax(scores.float(), -1)
        if self.greedy:  # what the sampler does too, without its cumulative sums over the vocabulary
            if not bool(torch.isfinite(logprobs.amax(-1)).all()):
                raise FloatingPointError("logits are not finite")
            ids = scores.argmax(-1)
        else:
            ids, _ = sample(scores, self.params, self.lengths.to(scores.device) + len(self.ids))
        self.ids.append(ids)
        self.logprobs.append(logprobs.gather(-1, ids[:, None])[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(-1, ids[:, None], 0.0)

    def drawn(self) -> tuple[Tensor, Tensor]:
        """(ids int64 [B, steps], log-probs f32 [B, steps] under temperature 1)."""
        return torch.stack(self.ids, 1).cpu(), torch.stack(self.logprobs, 1).cpu()


class EngineRunner:
    """Qwen3 and Qwen3-MoE in this package's engine, experts or MLP and KV cache in the format that the form names."""

    def __init__(self, form: LocalForm, sampling: Sampling, device: str, dtype: str, batch_size: int) -> None:
        self.form, self.sampling, self.device = form, sampling, resolve_device(device, "--device")
        self.config: Any = read_config(form.path)
        read_tokenizer(form.path, self.config)
        self.encode = Encoder(form, sampling.chat)
        self.compute, self.batch_size = _engine_dtype(form, dtype), batch_size
        with _quiet():
            self.weights = dict(load_policy(form.path, self.compute).named_parameters())
        self.engine: RolloutEngine | None = None
        self.engine_length = 0
        self.stops = self.encode.stops(self.config)
        self.about = {
            "device": self.device,
            "dtype": self.compute,
            "chat": self.encode.chat,
            "recipe_hash": _engine_recipe(form, self.config).hash,
        }

    def limit(self) -> int:
        return int(self.config.max_position_embeddings)

    def generate(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[Answer]:
        """One answer a prompt. Raises TracefpError where the logits are not finite."""
        s = self.sampling
        new = min(s.max_new_tokens, self.limit() - max(map(len, prompts)))
        needed = max(map(len, prompts)) + new
        if self.engine is None or needed > self.engine_length:
            self.engine = None  # its cache goes before the next one comes
            self.engine = _engine_of(self.form, self.config, self.compute, self.batch_size, needed, self.device)
            self.engine_length = needed
            self.about["backend"] = self.engine.config.backend
            self.engine.update_weights(self.weights.items(), 0)
        requests = [
            Request(f"r{i}", tuple(p), SamplingParams(s.temperature, s.top_p, new, tuple(self.stops), seed=seed))
            for i, (p, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        started = time.perf_counter()
        with _model_errors(self.form):
            trajectories = {t.request_id: t for t in self.engine.generate(requests)}
        seconds = time.perf_counter() - started
        unscaled = s.temperature in (0.0, 1.0)  # else the engine's log-probs are those of another temperature
        answers = []
        for i, prompt in enumerate(prompts):
            t = trajectories[f"r{i}"]
            answer = finished(self.encode, self.stops, prompt, list(t.response_ids), t.logprobs.tolist(), seconds)
            answers.append(answer if unscaled else Answer(**{**answer.__dict__, "logprobs": None}))
        return answers


def _engine_dtype(form: LocalForm, dtype: str) -> str:
    compute = "bfloat16" if dtype == "auto" else dtype
    if compute not in ("bfloat16", "float32"):
        raise TracefpError(f"{form.text}: the engine computes in bfloat16 or float32, not in {dtype} (--dtype)")
    return compute


def _engine_recipe(form: LocalForm, config: Any) -> QuantRecipe:
    layers = config.num_hidden_layers
    return QuantRecipe(layers, weights=form.weights, activations=form.activations, kv=form.weights)


def _engine_of(form: LocalForm, config: Any, dtype: str, batch_size: int, length: int, device: str) -> RolloutEngine:
    """An engine without weights; over the kernels on a GPU where they take model and format, else in plain torch."""
    settings = RolloutConfig(dtype=dtype, max_num_seqs=batch_size, max_model_len=length)
    return RolloutEngine(config, _engine_recipe(form, config), settings, device=device)


def finished(
    encoder: Encoder, stops: Sequence[int], prompt: list[int], row: list[int], logprobs: list[float], seconds: float
) -> Answer:
    """The answer that a row of drawn tokens holds, up to its first stop token."""
    ends = [i for i, token in enumerate(row) if token in stops]
    count = ends[0] + 1 if ends else len(row)
    return Answer(
        text=encoder.decode(row[:count]),
        finish="stop" if ends else "length",
        seconds=seconds,
        prompt_tokens=len(prompt),
        tokens=count,
        prompt_ids=prompt,
        token_ids=row[:count],
        logprobs=[round(value, 6) for value in logprobs[:count]],
    )


def _load(form: LocalForm, device: str, dtype: str) -> Any:
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(form.path)}
    compressed = form.kind != "gguf" and stored_quantization(form.path) == "compressed-tensors"
    if compressed:
        _require("compressed-tensors", form)
    if form.kind == "gguf":
        for package in ("gguf", "accelerate"):  # transformers loads GGUF weights with the latter
            _require(package, form)
        source = {"pretrained_model_name_or_path": str(form.path.parent), "gguf_file": form.path.name}
    with _quiet():
        _config(form, source)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **source,
                dtype="auto" if dtype == "auto" else getattr(torch, dtype),
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # whatever a damaged file meets
            raise TracefpError(f"{form.text} cannot be loaded ({type(error).__name__}): {_one_line(error)}") from error
    model, info = loaded
    for kind in ("missing_keys", "mismatched_keys"):  # transformers fills them with random numbers
        if names := sorted(map(str, info.get(kind) or [])):
            raise TracefpError(f"{form.text} lacks weight {names[0]} ({len(names)} of its {kind})")
    if compressed and model.dtype != torch.bfloat16:  # its forward would meet two dtypes
        raise TracefpError(f"{form.text}: compressed-tensors weights become bfloat16 here: add --dtype bfloat16")
    return model.to(device).eval()


def _config(form: LocalForm, source: dict[str, Any]) -> Any:
    try:
        return AutoConfig.from_pretrained(**source, local_files_only=True)
    except Exception as error:  # its validators raise whatever a wrong value meets
        raise TracefpError(f"{form.text} cannot be loaded ({type(error).__name__}): {_one_line(error)}") from error


def _require(package: str, form: LocalForm) -> None:
    if importlib.util.find_spec(PACKAGES[package]) is None:
        raise TracefpError(f"{form.text} needs the package {package}, which is not installed: pip install {package}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warnings and bars: what matters of them is an error here."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextmanager
def _model_errors(form: LocalForm) -> Iterator[None]:
    try:
        yield
    except FloatingPointError:
        raise TracefpError(
            f"{form.text}: its logits are not finite; are the weights damaged, or the dtype too narrow?"
        ) from None
    except torch.OutOfMemoryError as error:
        raise TracefpError(
            f"{form.text} does not fit the device's memory: lower --batch-size or --max-new-tokens"
        ) from error


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:300] + "..."
