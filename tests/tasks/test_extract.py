import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefp4.tasks.extract import INSTRUCTIONS, extract_answer


@pytest.mark.parametrize(
    ("text", "answer_format", "expected"),
    [
        ("6*7=42\n#### 42", "hashes", "42"),
        ("#### 41\nno, wait\n#### 42\nbye", "hashes", "42"),
        ("####\n42", "hashes", None),
        ("42", "hashes", None),
        ("<answer> 42 </answer>", "answer_tag", "42"),
        ("<answer>41</answer> or <answer>4\n2</answer>.", "answer_tag", "4\n2"),
        ("an <answer> is <answer>42</answer>", "answer_tag", "42"),
        ("<answer>42", "answer_tag", None),
        ("42</answer>", "answer_tag", None),
        (r"so \boxed{\frac{1}{2}} it is", "boxed", r"\frac{1}{2}"),
        (r"\boxed{1} \boxed{2}", "boxed", "2"),
        (r"\boxed{1", "boxed", None),
        ("a\n b \n\n", "last_line", "b"),
        (" \n", "last_line", None),
        ("<answer>1</answer>\n#### 2", "auto", "2"),
        (r"\boxed{1} <answer>2</answer>", "auto", "2"),
        ("the answer:\n3", "auto", "3"),
        ("", "auto", None),
    ],
)
def test_formats(text, answer_format, expected):
    assert extract_answer(text, answer_format) == expected


def test_an_answer_of_several_lines():
    assert extract_answer("so\n#### 1 2\n3 4\n", "hashes", lines=True) == "1 2\n3 4"
    assert extract_answer("#### 1 2\n3 4", lines=True) == "1 2\n3 4"
    assert extract_answer("<answer>1 2\n3 4</answer>", lines=True) == "1 2\n3 4"


@given(st.text(alphabet=" #<>/answerboxd{}\\\n42", max_size=80), st.sampled_from(list(INSTRUCTIONS)))
def test_what_is_found_stands_in_the_text(text, answer_format):
    found = extract_answer(text, answer_format)
    assert found is None or (found and found in text and found == found.strip())
