import pytest
from pydantic import ValidationError

from tracefp4.errors import TracefpError
from tracefp4.tasks import Task, TaskConfig, make_task


def test_make_task_gives_the_protocol():
    assert isinstance(make_task(TaskConfig()), Task)


def test_unknown_task_names_the_nearest_one():
    with pytest.raises(TracefpError, match="unknown task 'runing_sum'; did you mean running_sums"):
        make_task(TaskConfig(name="runing_sum"))


@pytest.mark.parametrize(
    "values",
    [
        {"min_terms": 1},
        {"max_terms": 13},
        {"min_terms": 6, "max_terms": 5},
        {"min_digits": 3, "max_digits": 2},
        {"min_digits": 0},
        {"seed": -1},
        {"seed": 2**31},
        {"free_letters": 9},
        {"terms": 3},
    ],
)
def test_config_refuses(values):
    with pytest.raises(ValidationError):
        TaskConfig(**values)
