"""Stand-ins for the parts that need a model or a clock, public and kept as carefully as the parts themselves.

They make schedules testable without torch: `ScriptedRunner` executes plans and checks every promise in them,
`ManualClock` moves only when told, `ByteTokenizer` (in `noria.fakes.tokenizer`) needs no vocabulary file.
"""

from noria.fakes.clock import ManualClock
from noria.fakes.runner import PlanViolation, ScriptedRunner

__all__ = ["ManualClock", "PlanViolation", "ScriptedRunner"]
