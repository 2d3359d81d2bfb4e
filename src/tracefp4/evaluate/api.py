"""What `tracefp4.evaluate` exports."""

from tracefp4.evaluate.folder import EVAL, answered
from tracefp4.evaluate.run import EvalRequest, Evaluation, evaluate
from tracefp4.evaluate.target import Form, load_target, make_forms

__all__ = ["EVAL", "EvalRequest", "Evaluation", "Form", "answered", "evaluate", "load_target", "make_forms"]
