import random

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache

from checkpoints import save_tiny_checkpoint
from kvplus_eval.measured import Measured
from kvplus_eval.metrics import METRICS
from kvplus_eval.tasks import TASKS, Haystack, answer_sample, make_samples
from kvplus_eval.tasks.base import Sample

LENGTHS, DEPTHS = (160, 300), (0, 0.5, 1)


class Letters:
    """A tokenizer of single characters, which knows all of them."""

    unk_token_id = None

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.fixture
def haystack():
    hay = [ord(letter) for letter in "It rained for nine days and then the river rose. " * 40]
    return Haystack(Letters(), hay, prefix=[1])


def contains(whole, part):
    return [start for start in range(len(whole)) if whole[start : start + len(part)] == part]


@pytest.mark.parametrize("task", TASKS)
def test_every_sample_has_its_length_its_answer_and_begins_as_the_model_wants(task, haystack):
    lengths = (400, 600)
    samples = make_samples(task, haystack, lengths, DEPTHS, 2)
    assert len(samples) == len(lengths) * len(DEPTHS) * 2
    for place, sample in samples:
        left_over = place["length_tokens"] - len(sample.question) - len(sample.context)
        assert 0 <= left_over < 16
        assert len(sample.context) % 16 == 0
        assert sample.context[0] == 1
        assert contains(sample.context, sample.answer)


@pytest.mark.parametrize("task", TASKS)
def test_a_deeper_fact_lies_further_back(task, haystack):
    begins = []
    for depth in DEPTHS:
        ((_, sample),) = make_samples(task, haystack, (600,), (depth,), 1)
        begins.append(contains(sample.context, sample.answer)[0])
    assert begins == sorted(begins)
    assert begins[0] < 150
    assert begins[-1] > 400


def test_the_same_arguments_give_the_same_samples_and_others_differ(haystack):
    first, second = (make_samples("needle", haystack, (300,), (0.5,), 2) for _ in range(2))
    assert first == second
    assert first[0][1].answer != first[1][1].answer


def test_several_keys_are_there_and_only_the_wanted_one_answers(haystack):
    (_, sample), *_ = make_samples("multikey", haystack, (600,), (0.5,), 1)
    text = haystack.tokenizer.decode(sample.context)
    assert text.count("The secret number of") == 4
    city = haystack.tokenizer.decode(sample.question).split()[-2]
    number = haystack.tokenizer.decode(sample.answer).strip()
    assert f"The secret number of {city} is {number}." in text


def test_a_text_shorter_than_the_task_is_refused(haystack):
    with pytest.raises(
        ValueError, match="has 1960 tokens, fewer than the 49.. that this task needs; use smaller --task-lengths"
    ):
        make_samples("needle", haystack, (5000,), (0.5,), 1)


def test_a_tokenizer_without_words_is_sent_to_the_copy_task(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_checkpoint(tmp_path))
    haystack = Haystack(tokenizer, list(range(1, 60)) * 10)
    with pytest.raises(ValueError, match="doesn't know the words.*use the task `copy`"):
        make_samples("needle", haystack, (200,), (0.5,), 1)
    assert make_samples("copy", haystack, (200,), (0.5,), 1)


def test_an_answer_counts_when_greedy_decoding_gives_it(llama):
    generator = random.Random(0)
    context = [generator.randrange(1, 128) for _ in range(60)]
    question = [5, 6]
    ids = torch.tensor([context + question])
    said = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)[
        0, ids.shape[1] :
    ]
    right = Sample(context, question, said.tolist())
    assert answer_sample(llama, DynamicCache(config=llama.config), right, 16)["exact"] == 1
    wrong = Sample(context, question, [*said.tolist()[:-1], (said[-1].item() + 1) % 128])
    found = answer_sample(llama, DynamicCache(config=llama.config), wrong, 16)
    assert found["exact"] == 0
    assert found["nats"] > answer_sample(llama, DynamicCache(config=llama.config), right, 16)["nats"]


def test_figures_are_means_by_task_and_none_where_nothing_was_asked():
    answers = [{"task": "needle", "exact": exact, "nats": 1.0} for exact in (1, 0, 1, 1)]
    figures = METRICS.get("retrieval").summarize(Measured(answers=answers))
    assert figures["needle_accuracy"] == 0.75
    assert figures["copy_accuracy"] is None
