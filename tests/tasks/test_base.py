import pytest
from pydantic import TypeAdapter, ValidationError

from tracefp4.errors import TracefpError
from tracefp4.tasks import TASKS, AnyTaskConfig, Task, TaskConfig, make_task
from tracefp4.tasks.running_sums import RunningSumsConfig


def test_make_task_gives_the_protocol():
    assert isinstance(make_task(RunningSumsConfig()), Task)


def test_unknown_task_names_the_nearest_one():
    with pytest.raises(TracefpError, match="unknown task 'runing_sum'; did you mean running_sums"):
        make_task(TaskConfig(name="runing_sum"))


def test_a_section_without_a_name_is_running_sums():
    adapter = TypeAdapter(AnyTaskConfig)
    assert adapter.validate_python({"max_terms": 4}) == RunningSumsConfig(max_terms=4)
    assert adapter.validate_python(RunningSumsConfig(max_terms=4)) == RunningSumsConfig(max_terms=4)


def test_every_task_has_a_config_of_its_name():
    names = {config.model_fields["name"].default for config in TaskConfig.__subclasses__()}
    names |= {
        config.model_fields["name"].default for sub in TaskConfig.__subclasses__() for config in sub.__subclasses__()
    }
    assert set(TASKS) <= names


@pytest.mark.parametrize(
    "values",
    [
        {"min_terms": 1},
        {"max_terms": 97},
        {"min_terms": 6, "max_terms": 5},
        {"min_digits": 3, "max_digits": 2},
        {"min_digits": 0},
        {"seed": -1},
        {"seed": 2**31},
        {"free_letters": 9},
        {"free_letters": 5, "careless_letters": 4},
        {"free_letters": 0, "careless_letters": 2},
        {"terms": 3},
    ],
)
def test_config_refuses(values):
    with pytest.raises(ValidationError):
        RunningSumsConfig(**values)
