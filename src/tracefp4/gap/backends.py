"""How each kind of form answers a list of jobs and scores the other's answers, behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from tracefp4.errors import TracefpError
from tracefp4.gap.answers import Answer, Failure, Job, Key, Sampling
from tracefp4.gap.distance import aligned
from tracefp4.gap.endpoint import Endpoint, ask_for, ask_scores, read_answer, read_scores
from tracefp4.gap.forms import EndpointForm, Form, LocalForm
from tracefp4.gap.inquiries import Inquiry

Found = list[tuple[Job, Answer | Failure]]
OnAnswers = Callable[[Found, float], None]
"""Called with answers to keep and the seconds they took."""


class Backend(Protocol):
    """about: what the report says of the form."""

    about: dict[str, Any]

    def batches(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """All jobs in the portions in which they are answered; the same for the same jobs."""
        ...

    def answer(self, batches: Iterable[Sequence[Job]], keep: OnAnswers) -> None: ...

    def score(self, items: Sequence[tuple[Job, Answer]]) -> Iterator[tuple[Job, list[int], list[float], list[float]]]:
        """(job, token ids, their log-probs in the answer, under this form) of the other form's answers that can be
        scored; in order, others left out."""
        ...


class LocalBackend:
    """Decodes batches of prompts of like length, which need little padding."""

    def __init__(
        self,
        form: LocalForm,
        inquiries: Sequence[Inquiry],
        sampling: Sampling,
        device: str,
        dtype: str,
        batch_size: int,
    ) -> None:
        from tracefp4.gap.local import load_runner

        self.form, self.inquiries, self.sampling, self.batch_size = form, inquiries, sampling, batch_size
        self.runner = load_runner(form, sampling, device, dtype, batch_size)
        self.about = self.runner.about | {"batch_size": batch_size}
        self.prompts: list[list[int] | Failure] = [self._encode(inquiry) for inquiry in inquiries]

    def _encode(self, inquiry: Inquiry) -> list[int] | Failure:
        try:
            ids = self.runner.encode(inquiry.messages)
        except TracefpError as error:
            return Failure(str(error), final=True)
        room = self.runner.limit() - len(ids)
        if room < 1:
            return Failure(f"the prompt has {len(ids)} tokens and the model takes {self.runner.limit()}", final=True)
        return ids

    def batches(self, jobs: Sequence[Job]) -> list[list[Job]]:
        def length(job: Job) -> int:
            prompt = self.prompts[job.inquiry]
            return 0 if isinstance(prompt, Failure) else len(prompt)

        ordered = sorted(jobs, key=length)  # stable: file order among equals
        return [ordered[i : i + self.batch_size] for i in range(0, len(ordered), self.batch_size)]

    def answer(self, batches: Iterable[Sequence[Job]], keep: OnAnswers) -> None:
        for batch in batches:
            prompts = [(job, self.prompts[job.inquiry]) for job in batch]
            found: Found = [(job, prompt) for job, prompt in prompts if isinstance(prompt, Failure)]
            asked = [(job, prompt) for job, prompt in prompts if not isinstance(prompt, Failure)]
            answers = []
            if asked:
                seeds = [job.seed(self.sampling.seed) for job, _ in asked]
                answers = self.runner.generate([prompt for _, prompt in asked], seeds)
            found += [(job, answer) for (job, _), answer in zip(asked, answers, strict=True)]
            keep(found, answers[0].seconds if answers else 0.0)

    def score(self, items: Sequence[tuple[Job, Answer]]) -> Iterator[tuple[Job, list[int], list[float], list[float]]]:
        scorer = getattr(self.runner, "score", None)
        if scorer is None:
            return
        encoder = getattr(self.runner.encode, "tokenizer", None)
        for job, answer in items:
            prompt = self.prompts[job.inquiry]
            if isinstance(prompt, Failure) or (answer.prompt_ids is not None and answer.prompt_ids != prompt):
                continue
            pair = aligned(
                answer,
                lambda text: list(encoder(text, add_special_tokens=False)["input_ids"]),  # type: ignore[misc]
                self.runner.encode.decode,  # type: ignore[attr-defined]
            )
            if pair is None or len(prompt) + len(pair[0]) > self.runner.limit():
                continue
            ids, own = pair
            (scored,) = scorer([prompt], [ids])
            yield job, ids, own, scored


class EndpointBackend:
    """Sends the jobs to a server."""

    def __init__(
        self,
        form: EndpointForm,
        inquiries: Sequence[Inquiry],
        sampling: Sampling,
        concurrency: int,
        timeout: float,
        retries: int,
        scored: frozenset[Key],
    ) -> None:
        self.inquiries, self.sampling, self.scored = inquiries, sampling, scored
        self.endpoint = Endpoint(form, concurrency, timeout, retries)
        self.about: dict[str, Any] = {"server": form.url, "model": form.model, "concurrency": concurrency}

    def batches(self, jobs: Sequence[Job]) -> list[list[Job]]:
        return [[job] for job in jobs]

    def answer(self, batches: Iterable[Sequence[Job]], keep: OnAnswers) -> None:
        jobs = [job for batch in batches for job in batch]
        asks = (
            ask_for(self.inquiries[j.inquiry].messages, self.sampling, j.seed(self.sampling.seed), j.key in self.scored)
            for j in jobs
        )

        def done(number: int, found: dict[str, Any] | Failure, seconds: float) -> None:
            keep([(jobs[number], read_answer(found, seconds))], seconds)

        self.endpoint.run(asks, done)
        self.about["retried"] = self.endpoint.retried

    def score(self, items: Sequence[tuple[Job, Answer]]) -> Iterator[tuple[Job, list[int], list[float], list[float]]]:
        """By vLLM's prompt_logprobs; a server that does not give them for the first answer is asked no more."""
        able = [
            (job, a.prompt_ids, a.token_ids, a.logprobs)
            for job, a in items
            if a.prompt_ids and a.token_ids and a.logprobs
        ]
        for part in (able[:1], able[1:]):
            replies: dict[int, list[float] | None] = {}
            asks = [ask_scores(prompt, ids) for _, prompt, ids, _ in part]

            def done(
                number: int,
                found: dict[str, Any] | Failure,
                seconds: float,
                part: Sequence[Any] = part,
                replies: dict[int, list[float] | None] = replies,
            ) -> None:
                replies[number] = read_scores(found, part[number][2])

            try:
                self.endpoint.run(asks, done)
            except TracefpError:  # a server without /completions answers 404; the answers themselves are had already
                return
            for number, (job, _, ids, own) in enumerate(part):
                values = replies.get(number)
                if values is not None:
                    yield job, ids, own, values
            if all(value is None for value in replies.values()):
                return


def check_form(form: Form, sampling: Sampling, options: Any) -> None:
    """Raises TracefpError for what would keep ``make_backend`` from it and shows without weights or requests."""
    if isinstance(form, EndpointForm):
        form.key()
        return
    from tracefp4.gap.local import check_local

    check_local(form, sampling, options.device, options.dtype)


def make_backend(
    form: Form, inquiries: Sequence[Inquiry], sampling: Sampling, options: Any, scored: frozenset[Key]
) -> Backend:
    """options: a ``tracefp4.gap.run.GapOptions``; scored: answers whose log-probs are wanted.

    Raises TracefpError where the form cannot be loaded, or a key is not set.
    """
    if isinstance(form, LocalForm):
        return LocalBackend(form, inquiries, sampling, options.device, options.dtype, options.batch_size)
    return EndpointBackend(form, inquiries, sampling, options.concurrency, options.timeout, options.retries, scored)
