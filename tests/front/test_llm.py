"""`noria.LLM` over an engine without a model: results, refusals, stop strings, interrupts."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import noria.llm
from noria import LLM, SamplingParams
from noria.core.events import FinishReason
from noria.engine.messages import EngineRequest
from noria.errors import ContextLengthError, EngineError, OptionError, RequestError, UnavailableError
from support.fakes import MAX_MODEL_LEN, alphabet, alphabet_llm, assert_idle

FOUR = SamplingParams(max_tokens=4)


def texts(results: list[Any]) -> list[str]:
    return [result.text for result in results]


def test_results_come_in_the_order_of_the_prompts() -> None:
    llm = alphabet_llm()
    samplings = [SamplingParams(max_tokens=count) for count in (5, 1, 3)]
    results = llm.generate(["a", "m", "t"], samplings)
    assert texts(results) == ["bcdef", "n", "uvw"]
    assert [result.prompt for result in results] == ["a", "m", "t"]
    assert [result.num_completion_tokens for result in results] == [5, 1, 3]
    assert_idle(llm)


def test_text_and_token_ids_are_the_same_prompt() -> None:
    llm = alphabet_llm()
    assert texts(llm.generate("ab", FOUR)) == ["cdef"]
    assert texts(llm.generate([97, 98], FOUR)) == ["cdef"]
    assert texts(llm.generate([[97, 98], "k"], FOUR)) == ["cdef", "lmno"]
    assert llm.generate([], FOUR) == []


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        ("", RequestError),
        ([], RequestError),
        ([-1], RequestError),
        ([258], RequestError),
        ([2**40], RequestError),
        (["a", 1], RequestError),
        ([True], RequestError),
        (1.5, RequestError),
        (None, RequestError),
        ("x" * MAX_MODEL_LEN, ContextLengthError),
        ("x" * (MAX_MODEL_LEN - 3), ContextLengthError),
    ],
)
def test_a_bad_prompt_is_an_error_among_good_results(bad: Any, kind: type[RequestError]) -> None:
    llm = alphabet_llm()
    first, second, third = llm.generate(["a", bad, "m"], FOUR)
    assert (first.text, third.text) == ("bcde", "nopq")
    assert type(second.error) is kind
    assert second.outputs == []
    with pytest.raises(kind):
        _ = second.text
    assert_idle(llm)


def test_the_number_of_sampling_parameters_must_match() -> None:
    with pytest.raises(RequestError, match="2 sampling parameters for 3 prompts"):
        alphabet_llm().generate(["a", "b", "c"], [FOUR, FOUR])


def test_unknown_options_are_refused_with_a_suggestion() -> None:
    with pytest.raises(OptionError, match="did you mean max_num_seqs"):
        noria.llm.LLM(max_num_seq=3)


def test_end_of_sequence_and_stop_tokens() -> None:
    llm = alphabet_llm()
    [ended] = llm.generate("w", SamplingParams())
    assert (ended.text, ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == (
        "xyz",
        FinishReason.STOP,
        None,
    )
    [stopped] = llm.generate("a", SamplingParams(stop_token_ids=(ord("d"),)))
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == (FinishReason.STOP, ord("d"))
    [cut] = llm.generate("a", FOUR)
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == (FinishReason.LENGTH, None)


def test_without_max_tokens_the_context_is_the_end() -> None:
    [result] = alphabet_llm().generate("a", SamplingParams(ignore_eos=True, stop_token_ids=()))
    assert result.num_prompt_tokens + result.num_completion_tokens == MAX_MODEL_LEN
    assert result.outputs[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("include", "text"), [(False, "bcd"), (True, "bcdef")])
def test_a_stop_string_ends_text_tokens_and_logprobs_together(include: bool, text: str) -> None:
    llm = alphabet_llm()
    sampling = SamplingParams(stop=("ef", "zz"), logprobs=0, include_stop_str_in_output=include)
    [result] = llm.generate("a", sampling)
    output = result.outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text, FinishReason.STOP, "ef")
    assert bytes(output.token_ids) == b"bcdef"
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    assert_idle(llm)


def test_a_stop_string_completed_by_the_last_token_wins() -> None:
    [result] = alphabet_llm().generate("a", SamplingParams(stop=("de",), max_tokens=4))
    assert (result.text, result.outputs[0].stop_reason) == ("bc", "de")


def test_n_sequences() -> None:
    llm = alphabet_llm()
    [result] = llm.generate("a", SamplingParams(n=3, max_tokens=2))
    assert [(output.index, output.text) for output in result.outputs] == [(0, "bc"), (1, "bc"), (2, "bc")]
    assert result.num_completion_tokens == 6
    assert result.num_prompt_tokens == 1


def test_cached_tokens_are_counted() -> None:
    llm = alphabet_llm()
    assert [llm.generate("abcdefghi", FOUR)[0].num_cached_tokens for _ in range(2)] == [0, 8]


def test_more_prompts_than_are_submitted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noria.llm, "MAX_SUBMITTED", 3)
    llm = alphabet_llm(max_num_seqs=2)
    results = llm.generate([chr(97 + i % 20) for i in range(50)], SamplingParams(max_tokens=2))
    assert texts(results) == [chr(98 + i % 20) + chr(99 + i % 20) for i in range(50)]


def test_a_failing_step_is_the_error_of_its_requests() -> None:
    def fail() -> None:
        raise ValueError("no such luck")

    llm = alphabet_llm(interrupt_at=2, action=fail)
    [result] = llm.generate("a", FOUR)
    assert isinstance(result.error, EngineError)
    assert "no such luck" in str(result.error)
    assert texts(llm.generate("a", FOUR)) == ["bcde"]
    assert_idle(llm)


def test_an_exception_on_the_way_aborts_the_call_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = alphabet_llm()
    stream = llm.stream("m", FOUR)
    assert next(stream) == "n"

    def fail(*_: Any) -> list[int]:
        raise ZeroDivisionError

    monkeypatch.setattr(llm.tokenizer, "encode", fail)
    with pytest.raises(ZeroDivisionError):
        llm.generate([[97], "a"], FOUR)
    monkeypatch.undo()
    assert "".join(stream) == "opq"
    assert texts(llm.generate("a", FOUR)) == ["bcde"]
    assert_idle(llm)


def test_ctrl_c_waits_for_the_end_of_the_step_and_leaves_the_llm_usable() -> None:
    llm = alphabet_llm(interrupt_at=3, action=lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams())
    last = llm.assembled.core.records[-1]
    assert list(last.result.token_ids) == list(last.plan.num_scheduled_tokens)  # the step was not cut in half
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_idle(llm)
    assert texts(llm.generate("a", FOUR)) == ["bcde"]


def test_a_second_ctrl_c_gets_through_at_once() -> None:
    def interrupt_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one did not get through")

    llm = alphabet_llm(interrupt_at=2, action=interrupt_twice)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", FOUR)
    assert_idle(llm)
    assert texts(llm.generate("a", FOUR)) == ["bcde"]


def test_a_stream_gives_pieces_and_ends_when_it_is_left() -> None:
    llm = alphabet_llm()
    assert list(llm.stream("a", FOUR)) == ["b", "c", "d", "e"]
    with contextlib.closing(llm.stream("a", SamplingParams())) as stream:
        assert next(stream) == "b"
    assert_idle(llm)
    with pytest.raises(RequestError, match="n must be 1"):
        next(llm.stream("a", SamplingParams(n=2)))
    with pytest.raises(RequestError):
        next(llm.stream("", FOUR))


def test_a_stream_goes_on_while_others_generate() -> None:
    llm = alphabet_llm()
    stream = llm.stream("a", SamplingParams(max_tokens=8))
    pieces = [next(stream)]
    assert texts(llm.generate(["m", "n"], FOUR)) == ["nopq", "opqr"]
    assert "".join(pieces + list(stream)) == "bcdefghi"


def test_closing_aborts_what_runs() -> None:
    with alphabet_llm() as llm:
        stream = llm.stream("a", SamplingParams())
        next(stream)
    assert_idle(llm)
    assert list(stream) == []


def test_chat_answers_one_or_several_conversations() -> None:
    llm = alphabet_llm()
    conversation = [{"role": "user", "content": "hello"}]
    [one] = llm.chat(conversation, SamplingParams(max_tokens=1))
    assert one.prompt_token_ids[-2:] == [ord(":"), ord(" ")]
    several = llm.chat([conversation, [{"role": "user"}], conversation], SamplingParams(max_tokens=1))
    assert [result.error is None for result in several] == [True, False, True]
    assert isinstance(several[1].error, RequestError)


def test_an_engine_that_goes_idle_too_early_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = alphabet_llm()
    monkeypatch.setattr(llm.assembled.core, "step", list)
    monkeypatch.setattr(type(llm.assembled.core), "has_work", False)
    with pytest.raises(EngineError, match="1 requests unfinished"):
        llm.generate("a", FOUR)


def test_progress_goes_to_stderr_and_only_when_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    llm = alphabet_llm()
    llm.generate(["a", ""], FOUR)
    assert capsys.readouterr() == ("", "")
    llm.generate(["a", ""], FOUR, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "2/2" in err


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text("abmxyz", max_size=70), st.integers(1, 12), st.integers(1, 3), st.sampled_from(["", "op", "z"])
        ),
        max_size=12,
    )
)
def test_every_answer_is_that_of_its_request_alone(requests: list[tuple[str, int, int, str]]) -> None:
    prompts = [prompt for prompt, *_ in requests]
    samplings = [
        SamplingParams(max_tokens=max_tokens, n=n, stop=(stop,) if stop else ()) for _, max_tokens, n, stop in requests
    ]
    llm = alphabet_llm(num_blocks=17, max_num_batched_tokens=8)
    together = llm.generate(prompts, samplings)
    assert_idle(llm)
    for prompt, sampling, result in zip(prompts, samplings, together, strict=True):
        [alone] = alphabet_llm().generate([prompt], sampling)
        assert result.outputs == alone.outputs
        assert str(result.error) == str(alone.error)


def test_a_full_queue_is_waited_for_and_nobody_is_refused() -> None:
    llm = alphabet_llm(max_num_seqs=2, max_num_queued_reqs=1)
    results = llm.generate([chr(97 + i) for i in range(10)], SamplingParams(max_tokens=2))
    assert texts(results) == [chr(98 + i) + chr(99 + i) for i in range(10)]
    assert not any(record.refusals for record in llm.assembled.core.records)


def test_prompts_that_may_not_wait_together_follow_one_another() -> None:
    llm = alphabet_llm(max_num_seqs=1, max_num_queued_tokens=5)
    assert texts(llm.generate(["abc", "efg", "ijk"], FOUR)) == ["defg", "hijk", "lmno"]
    assert_idle(llm)


def test_what_the_queue_can_never_take_is_the_error_of_its_prompt() -> None:
    llm = alphabet_llm(max_num_seqs=1, max_num_queued_reqs=1)
    many, one = llm.generate(["a", "m"], [SamplingParams(n=3, max_tokens=4), FOUR])
    assert isinstance(many.error, UnavailableError)
    assert many.outputs == []
    assert one.text == "nopq"
    assert_idle(llm)


def test_a_deadline_is_the_error_of_its_request() -> None:
    [result] = alphabet_llm(request_deadline_s=1e-9).generate("a", FOUR)
    assert isinstance(result.error, UnavailableError)
    assert result.error.code == "deadline_exceeded"


def test_urgent_prompts_are_answered_first() -> None:
    llm = alphabet_llm(scheduling_policy="priority", max_num_seqs=1)
    assert texts(llm.generate(["a", "m", "k"], FOUR, priority=[2, 1, -3])) == ["bcde", "nopq", "lmno"]
    llm.chat([[{"role": "user", "content": "a"}]] * 2, FOUR, priority=[5, 4])
    order = [ending.request_id for record in llm.assembled.core.records for ending in record.endings]
    assert order == ["llm-2", "llm-1", "llm-0", "llm-4", "llm-3"]


def test_priorities_are_checked() -> None:
    with pytest.raises(RequestError, match="2 priorities for 3 prompts"):
        alphabet_llm().generate(["a", "b", "c"], FOUR, priority=[0, 0])
    [result] = alphabet_llm().generate("a", FOUR, priority=1)
    assert isinstance(result.error, RequestError)
    assert 'scheduling_policy="priority"' in str(result.error)


def test_a_policy_that_does_not_exist_is_told_before_a_model_is_looked_for() -> None:
    with pytest.raises(OptionError, match="no scheduling policy 'lifo'"):
        noria.llm.LLM("no/such/model", scheduling_policy="lifo")


def test_without_parameters_the_model_s_defaults_are_used_and_given_ones_are_taken_as_they_are() -> None:
    defaults = {"temperature": 0.0, "repetition_penalty": 1.1}
    llm = LLM.from_assembled(dataclasses.replace(alphabet(), sampling_defaults=defaults))
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, repetition_penalty=1.1)
    used: list[SamplingParams] = []
    submit = llm._client.submit

    def noting(request: EngineRequest) -> None:
        used.append(request.sampling)
        submit(request)

    llm._client.submit = noting  # type: ignore[method-assign]
    llm.generate("ab")
    list(llm.stream("ab"))
    llm.generate("ab", SamplingParams(max_tokens=2))
    assert used == [llm.get_default_sampling_params()] * 2 + [SamplingParams(max_tokens=2)]
