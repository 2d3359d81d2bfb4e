"""Values of command-line options."""

from __future__ import annotations

from tracefp4.config import ConfigError


def parse_seeds(text: str) -> list[int]:
    """'0,1,2' to numbers; ConfigError for anything else."""
    return parse_numbers("--seeds", text)


def parse_numbers(option: str, text: str) -> list[int]:
    """'0,1,2' to numbers; ConfigError, naming the option, for anything else."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) <= 40):
            raise ConfigError(f"{option} must be whole numbers joined by commas, such as 0,1,2, got '{text}'")
    numbers = [int(part) for part in parts]
    for number in numbers:
        if numbers.count(number) > 1:
            raise ConfigError(f"{option} names {number} twice")
    return numbers
