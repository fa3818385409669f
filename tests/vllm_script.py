"""Calls of vLLM's offline interface, as a user writes them; each case tells what came back, as JSON.

python tests/vllm_script.py MODEL            # under vLLM: what tests/data/vllm_answers.json holds (tools/vllm_answers.py)

tests/test_vllm_script.py changes "from vllm" to "from pagedlm" and compares. What is drawn at random is told by its
form alone: two engines never draw the same.
"""
import json
import sys
from collections import Counter

from vllm import LLM, SamplingParams, TextPrompt, TokensPrompt
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

OPTIONS = dict(dtype="float32", max_model_len=256, block_size=32, max_num_seqs=16, seed=0, enable_prefix_caching=True,
               scheduling_policy="priority", max_logprobs=20)
FRANCE, WATER, ONCE, HOT = "The capital of France is", "Water boils at", "Once upon a time", "The opposite of hot is"
LONG = "The sun rises in the east and sets in the west, and so it was in the days of the old king, who had a garden. " * 4
FRUITS = [dict(role="user", content="Name three fruits.")]
ITALY = [dict(role="system", content="Answer in one word."), dict(role="user", content="What is the capital of Italy?")]
GREEDY, LAST = dict(temperature=0, max_tokens=6), dict(temperature=0, max_tokens=1)
CASES, CALLS = {}, Counter()


def case(f):
    CASES[f.__name__] = f
    return f


def likely(positions):
    "Log-probabilities of some tokens: [[id, logprob, rank, text]…] for each position"
    return positions and [p and [[i, x.logprob, x.rank, x.decoded_token] for i, x in p.items()] for p in positions]


def told(outputs):
    "All that was said"
    return [dict(prompt=o.prompt, prompt_ids=list(o.prompt_token_ids), finished=o.finished,
                 prompt_logprobs=likely(o.prompt_logprobs), answers=[dict(
                     index=c.index, text=c.text, ids=list(c.token_ids), finish=c.finish_reason, stop=c.stop_reason,
                     total=c.cumulative_logprob, logprobs=likely(c.logprobs)) for c in o.outputs]) for o in outputs]


def form(outputs):
    "What does not depend on what was drawn, if nothing ends an answer early"
    return [[[c.index, len(c.token_ids), c.finish_reason, c.text != ""] for c in o.outputs] for o in outputs]


def ids_of(outputs): return [list(c.token_ids) for o in outputs for c in o.outputs]


def ask(llm, prompts, params=None, **kw):
    CALLS["generate"] += 1
    return llm.generate(prompts, SamplingParams(**params) if isinstance(params, dict) else params, use_tqdm=False, **kw)


def talk(llm, messages, params=GREEDY, **kw):
    CALLS["chat"] += 1
    return llm.chat(messages, SamplingParams(**params) if isinstance(params, dict) else params, use_tqdm=False, **kw)


def greedy(llm, prompts, **params): return told(ask(llm, prompts, GREEDY | params))


def drawn(llm, prompts, *some, **params):
    "The same prompt or prompts with each of some parameters"
    how = [SamplingParams(**dict(max_tokens=4, ignore_eos=True) | p) for p in some]
    return form(ask(llm, prompts, how or dict(max_tokens=4, ignore_eos=True) | params))


def outcome(f):
    "The exception's name, or that there was none"
    CALLS["that may be refused"] += 1
    try:
        f()
    except Exception as e:
        return type(e).__name__
    return "accepted"


# ---- prompts

@case
def a_text(llm): return greedy(llm, FRANCE, max_tokens=16)

@case
def several_texts(llm): return greedy(llm, [FRANCE, WATER, ONCE, HOT], max_tokens=16)

@case
def one_text_in_a_list(llm): return greedy(llm, [WATER])

@case
def ids(llm): return greedy(llm, [504, 3575, 282, 4649, 314])

@case
def several_lists_of_ids(llm): return greedy(llm, [[504, 3575, 282, 4649, 314], [6403, 1980, 253, 655]])

@case
def a_dict_with_text(llm): return greedy(llm, {"prompt": ONCE})

@case
def a_dict_with_ids(llm): return greedy(llm, {"prompt_token_ids": [6403, 1980, 253, 655]})

@case
def typed_prompts(llm): return greedy(llm, [TextPrompt(prompt=HOT), TokensPrompt(prompt_token_ids=[6403, 1980, 253, 655])])

@case
def text_beside_ids(llm): return greedy(llm, TokensPrompt(prompt_token_ids=[6403, 1980, 253, 655], prompt="shown"))

@case
def many_languages(llm): return greedy(llm, ["Les chats sont", "東京は", "Привет, как", "naïve café"], max_tokens=6)

@case
def one_letter(llm): return greedy(llm, "A", max_tokens=4)

@case
def special_tokens_in_a_text(llm): return greedy(llm, "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n")

@case
def more_prompts_than_rows(llm):
    outs = ask(llm, [f"{FRANCE.replace('France', c)}" for c in "ABCDEFGHIJKLMNOPQRST"], dict(temperature=0, max_tokens=3))
    return [len(outs), [o.prompt for o in outs], all(o.finished for o in outs)]


# ---- chats

@case
def a_chat(llm): return told(talk(llm, FRUITS, dict(temperature=0, max_tokens=40)))

@case
def chats(llm): return told(talk(llm, [FRUITS, ITALY], dict(temperature=0, max_tokens=8)))

@case
def a_chat_goes_on(llm):
    messages = FRUITS + [dict(role="assistant", content="Apple, pear, plum."), dict(role="user", content="One more.")]
    return told(talk(llm, messages))

@case
def a_chat_without_generation_prompt(llm):
    return told(talk(llm, FRUITS, add_generation_prompt=False))

@case
def a_chat_template_of_my_own(llm):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
    return told(talk(llm, FRUITS, chat_template=template))

@case
def switches_of_a_chat_template(llm):
    template = "{% if loud %}LOUD {% endif %}{{ messages[0].content }}"
    return told(talk(llm, FRUITS, chat_template=template, chat_template_kwargs=dict(loud=True)))

@case
def content_in_parts(llm):
    message = dict(role="user", content=[dict(type="text", text="Name three"), dict(type="text", text="fruits.")])
    return told(talk(llm, [message], dict(**GREEDY)))

@case
def params_for_each_chat(llm):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 5)]
    return told(talk(llm, [FRUITS, ITALY], params))


# ---- when to end

@case
def max_tokens(llm): return greedy(llm, FRANCE, max_tokens=1)

@case
def as_many_as_fit(llm): return greedy(llm, TokensPrompt(prompt_token_ids=[6403, 1980, 253, 655]*63), max_tokens=None, ignore_eos=True)

@case
def params_for_each_prompt(llm):
    return told(ask(llm, [FRANCE, WATER], [SamplingParams(temperature=0, max_tokens=3), SamplingParams(temperature=0, max_tokens=5)]))

@case
def the_model_ends(llm): return told(talk(llm, ITALY, dict(temperature=0, max_tokens=40)))

@case
def ignore_eos(llm): return told(talk(llm, ITALY, dict(temperature=0, max_tokens=16, ignore_eos=True)))

@case
def min_tokens(llm): return told(talk(llm, ITALY, dict(temperature=0, max_tokens=16, min_tokens=12)))

@case
def a_stop_string(llm): return greedy(llm, FRANCE, max_tokens=16, stop=".")

@case
def several_stop_strings(llm): return greedy(llm, [FRANCE, ONCE], max_tokens=16, stop=["there was", "Paris"])

@case
def a_stop_string_inside_a_token(llm): return greedy(llm, FRANCE, max_tokens=16, stop=["ari"])

@case
def a_stop_string_across_tokens(llm): return greedy(llm, ONCE, max_tokens=16, stop=["there was a"])

@case
def a_stop_string_that_never_comes(llm): return greedy(llm, FRANCE, stop=["\n\n\n\n"])

@case
def a_stop_string_shown(llm): return greedy(llm, FRANCE, max_tokens=16, stop=["."], include_stop_str_in_output=True)

@case
def a_stop_string_after_min_tokens(llm): return greedy(llm, ONCE, max_tokens=24, stop=[","], min_tokens=6)

@case
def a_stop_id(llm):
    plain = ids_of(ask(llm, ONCE, GREEDY))[0]
    return greedy(llm, ONCE, stop_token_ids=[plain[3], 7])

@case
def a_stop_id_shown(llm):
    plain = ids_of(ask(llm, ONCE, GREEDY))[0]
    return greedy(llm, ONCE, stop_token_ids=[plain[3]], include_stop_str_in_output=True)

@case
def a_stop_id_and_a_stop_string(llm): return greedy(llm, FRANCE, max_tokens=16, stop=["the"], stop_token_ids=[30])


# ---- how to choose

@case
def penalties(llm):
    some = (dict(presence_penalty=1.5), dict(frequency_penalty=1.0), dict(repetition_penalty=1.3), dict(presence_penalty=-1.0),
            dict(repetition_penalty=0.8), dict(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1))
    return told(ask(llm, [ONCE]*6, [SamplingParams(temperature=0, max_tokens=20, **p) for p in some]))

@case
def logit_bias(llm): return greedy(llm, FRANCE, logit_bias={42: 100.0, 7042: -100.0})

@case
def a_little_logit_bias(llm): return greedy(llm, FRANCE, logit_bias={7042: -5.5})

@case
def allowed_ids(llm): return greedy(llm, FRANCE, allowed_token_ids=[28, 30, 260, 284, 7042, 3575])

@case
def a_bad_word(llm): return greedy(llm, FRANCE, bad_words=["Paris"])

@case
def a_bad_word_of_two_tokens(llm): return greedy(llm, ONCE, bad_words=["there was", "little"])

@case
def a_bad_word_that_begins_differently_after_a_space(llm): return greedy(llm, HOT, bad_words=["cold", "cool"])

@case
def drawing(llm): return drawn(llm, [FRANCE, ONCE])

@case
def filters(llm):
    return drawn(llm, [FRANCE]*8, dict(temperature=.7), dict(temperature=1.9), dict(top_k=5), dict(top_k=-1), dict(top_k=10**6), dict(top_p=.9),
                 dict(min_p=.1), dict(temperature=.8, top_k=40, top_p=.95, min_p=.01))

@case
def filters_that_leave_one(llm):
    return told(ask(llm, [FRANCE]*3, [SamplingParams(max_tokens=6, seed=1, **p) for p in (dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0))]))

@case
def a_temperature_near_zero(llm): return greedy(llm, [FRANCE, ONCE], temperature=1e-6, top_p=.5, top_k=3)

@case
def a_seed(llm):
    how = dict(temperature=1.0, max_tokens=6, ignore_eos=True)
    first, again, other = (ids_of(ask(llm, ONCE, how | dict(seed=s))) for s in (7, 7, 8))
    return [first == again, first == other]

@case
def a_seed_in_a_crowd(llm):
    how = dict(temperature=1.0, max_tokens=6, ignore_eos=True)
    alone = ids_of(ask(llm, ONCE, how | dict(seed=7)))[0]
    crowd = ask(llm, [FRANCE, ONCE, WATER], [SamplingParams(**how), SamplingParams(**how, seed=7), SamplingParams(**how, seed=8)])
    return alone == ids_of(crowd)[1]

@case
def without_a_seed(llm): return len({str(i) for i in ids_of(ask(llm, [ONCE]*4, dict(max_tokens=8, ignore_eos=True)))}) > 1


# ---- several answers

@case
def three_answers(llm): return drawn(llm, FRANCE, n=3)

@case
def three_answers_with_a_seed(llm):
    how = dict(n=3, seed=5, temperature=1.0, max_tokens=5, ignore_eos=True)
    first, again = (ids_of(ask(llm, ONCE, how)) for _ in range(2))
    one_by_one = [ids_of(ask(llm, ONCE, how | dict(n=1, seed=5 + i)))[0] for i in range(3)]
    return [len(first), len({str(i) for i in first}), first == again, first == one_by_one]

@case
def answers_to_several_prompts(llm): return drawn(llm, [FRANCE, WATER], n=2)

@case
def answers_with_logprobs_and_a_stop(llm):
    out, = ask(llm, ONCE, dict(n=2, seed=1, max_tokens=6, logprobs=1, prompt_logprobs=0, stop=["zzzz"], ignore_eos=True))
    return [[len(c.logprobs) == len(c.token_ids), isinstance(c.cumulative_logprob, float)] for c in out.outputs] + [len(out.prompt_logprobs)]


# ---- how likely

@case
def logprobs(llm): return greedy(llm, FRANCE, logprobs=3)

@case
def logprobs_of_the_chosen(llm): return greedy(llm, FRANCE, logprobs=0)

@case
def logprobs_true(llm): return greedy(llm, FRANCE, logprobs=True, max_tokens=2)

@case
def logprobs_of_what_was_drawn(llm):
    c = ask(llm, ONCE, dict(temperature=2.0, seed=3, max_tokens=8, logprobs=2, ignore_eos=True))[0].outputs[0]
    return [[next(iter(p)) == i and i in p and 2 <= len(p) <= 3 for i, p in zip(c.token_ids, c.logprobs)],
            abs(sum(p[i].logprob for i, p in zip(c.token_ids, c.logprobs)) - c.cumulative_logprob) < 1e-3]

@case
def logprobs_beside_penalties(llm): return greedy(llm, ONCE, logprobs=2, repetition_penalty=1.5, logit_bias={28: -5.0})

@case
def logprobs_beside_temperature(llm): return told(ask(llm, FRANCE, dict(temperature=.5, top_k=1, max_tokens=4, logprobs=2)))

@case
def prompt_logprobs(llm): return greedy(llm, FRANCE, prompt_logprobs=2, max_tokens=2)

@case
def prompt_logprobs_of_the_prompt_alone(llm): return greedy(llm, WATER, prompt_logprobs=0, logprobs=1, max_tokens=1)

@case
def prompt_logprobs_of_what_is_cached(llm):
    plain, likely_again = ask(llm, LONG, LAST)[0], ask(llm, LONG, LAST | dict(prompt_logprobs=0))[0]
    return [len(likely_again.prompt_logprobs) == len(plain.prompt_token_ids), likely_again.num_cached_tokens]

@case
def logprobs_without_text(llm): return greedy(llm, FRANCE, logprobs=1, detokenize=False, max_tokens=2)


# ---- text

@case
def no_text(llm): return greedy(llm, FRANCE, detokenize=False)

@case
def special_tokens_shown(llm): return told(talk(llm, ITALY, dict(temperature=0, max_tokens=24, skip_special_tokens=False)))

@case
def special_tokens_side_by_side(llm):
    return [greedy(llm, FRANCE, logit_bias={2: 100.0}, max_tokens=3, ignore_eos=True, skip_special_tokens=False,
                   spaces_between_special_tokens=s) for s in (True, False)]

@case
def half_a_character(llm): return greedy(llm, "🙂🙂🙂🙂🙂🙂", max_tokens=5, ignore_eos=True)

@case
def output_kinds(llm): return [greedy(llm, FRANCE, output_kind=kind, max_tokens=3) for kind in RequestOutputKind]


# ---- the cache of prefixes, priorities, fields

@case
def cached_tokens(llm):
    text = "first. " + LONG
    return [ask(llm, text, LAST)[0].num_cached_tokens for _ in range(2)]

@case
def a_salt(llm):
    prompts = [dict(prompt="second. " + LONG, **salt) for salt in ({}, dict(cache_salt="a"), dict(cache_salt="b"), {}, dict(cache_salt="a"))]
    return [ask(llm, p, LAST)[0].num_cached_tokens for p in prompts]

@case
def skip_reading_the_cache(llm):
    text = "third. " + LONG
    return [ask(llm, text, LAST | dict(skip_reading_prefix_cache=skip))[0].num_cached_tokens for skip in (None, True, False)]

@case
def priorities(llm): return told(ask(llm, [FRANCE, WATER, ONCE], GREEDY, priority=[2, 0, 1]))

@case
def one_priority_for_all(llm): return told(ask(llm, [FRANCE, WATER], GREEDY, priority=3))

@case
def request_ids(llm):
    ids = [o.request_id for o in ask(llm, [FRANCE, WATER, ONCE], LAST)]
    return [all(isinstance(i, str) for i in ids), [int(i) - int(ids[0]) for i in ids]]

@case
def fields_of_an_output(llm):
    out = ask(llm, FRANCE, LAST)[0]
    return [type(out).__name__, type(out.outputs[0]).__name__, out.outputs[0].finished(), out.metrics is None]

@case
def the_models_defaults(llm):
    p = llm.get_default_sampling_params()
    return [p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.max_tokens, p.repetition_penalty]

@case
def no_params(llm): return [[len(o.outputs), len(o.outputs[0].token_ids) <= 16, o.outputs[0].finish_reason in ("stop", "length")] for o in ask(llm, [FRANCE, ONCE])]

@case
def the_tokenizer(llm):
    t = llm.get_tokenizer()
    return [t.encode(FRANCE), t.decode([504, 3575, 282, 4649, 314]), len(t.encode("naïve 🙂 year 1984, 3.14"))]

@case
def params_of_a_script(llm):
    p = SamplingParams(n=2, stop="x", stop_token_ids=(3, 4, 3), bad_words=["a"], top_k=-1, seed=-1, logprobs=True, temperature=.5)
    q = p.clone()
    return [p.stop, sorted({*p.stop_token_ids}), p.bad_words, p.top_k, p.seed, p.logprobs, q.stop, q is p, q.n]


# ---- structured outputs

@case
def one_of_a_choice(llm): return greedy(llm, FRANCE, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=[" London", " Paris", " Rome"]))

@case
def a_regex(llm): return greedy(llm, "The year of the moon landing is", max_tokens=12, structured_outputs=StructuredOutputsParams(regex=r" \d{4}"))

def keys_of(outputs):
    c = outputs[0].outputs[0]
    return [c.finish_reason, sorted(json.loads(c.text)), [type(x).__name__ for _, x in sorted(json.loads(c.text).items())]]

@case
def a_json_schema(llm):
    schema = dict(type="object", properties=dict(city=dict(type="string", maxLength=20), big=dict(type="boolean")),
                  required=["city", "big"], additionalProperties=False)
    p = SamplingParams(temperature=0, max_tokens=80, structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    return keys_of(talk(llm, [dict(role="user", content="Paris, as JSON.")], p))

@case
def a_json_schema_as_text(llm):
    schema = json.dumps(dict(type="object", properties=dict(n=dict(enum=[1, 2, 3])), required=["n"], additionalProperties=False))
    return keys_of(ask(llm, "A number as JSON: ", dict(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(json=schema))))

@case
def any_json_object(llm):
    out = ask(llm, "An object: ", dict(temperature=0, max_tokens=6, structured_outputs=StructuredOutputsParams(json_object=True)))[0].outputs[0]
    return [out.text.lstrip()[:1], out.finish_reason]

@case
def a_grammar(llm): return greedy(llm, FRANCE, max_tokens=12, structured_outputs=StructuredOutputsParams(grammar='root ::= " " ("Paris" | "Rome") "!"'))

@case
def structured_in_a_crowd(llm):
    some = [SamplingParams(**GREEDY), SamplingParams(**GREEDY, structured_outputs=StructuredOutputsParams(choice=[" Rome", " Oslo"])),
            SamplingParams(**GREEDY)]
    return told(ask(llm, [FRANCE, FRANCE, WATER], some))


# ---- what is refused, when it is written and when it is asked

BAD_PARAMS = [
    dict(n=0), dict(n=2, temperature=0), dict(n=10**6), dict(temperature=-1), dict(temperature=float("nan")), dict(temperature=2.5),
    dict(top_p=0), dict(top_p=1.1), dict(top_k=-2), dict(top_k=1.5), dict(min_p=-.1), dict(min_p=2), dict(presence_penalty=3), dict(frequency_penalty=-3),
    dict(repetition_penalty=0), dict(repetition_penalty=float("inf")), dict(max_tokens=0), dict(min_tokens=-1), dict(min_tokens=5, max_tokens=3),
    dict(logprobs=-2), dict(prompt_logprobs=-2), dict(stop=[""]), dict(stop="x", detokenize=False), dict(stop_token_ids=["x"]), dict(bad_words=[""]),
    dict(temperature="hot"), dict(best_of=2), dict(guided_json={}), dict(no_such_field=1), dict(logits_processors=[print])]

@case
def bad_params(llm): return {str(p): outcome(lambda: SamplingParams(**p)) for p in BAD_PARAMS}

@case
def bad_structures(llm):
    how = dict(none={}, two=dict(json="{}", regex="a"), three=dict(choice=["a"], regex="a", json_object=True))
    return {name: outcome(lambda: StructuredOutputsParams(**kw)) for name, kw in how.items()}

BAD_CALLS = {
    "no prompt": ([],), "an empty text": ("",), "a list with an empty text": ([""],), "no ids": ([[]],), "an empty dict": ({},), "None": (None,), "None in a list": ([None],), "a number": (5,),
    "half an id": ([1.5, 2],), "a dict of a number": ({"prompt": 5},), "ids out of the vocabulary": ([1, 49152],), "ids below zero": ([-1, 5],),
    "one bad prompt of two": (["fine", [1, 10**6]],), "as long as the limit": ([5]*256,), "longer than the limit": ([5]*300,),
    "params as a dict": (FRANCE, [dict(temperature=0)]), "too few params": ([FRANCE, WATER], [SamplingParams()]),
    "stop ids": (FRANCE, dict(stop_token_ids=[49152])), "bias": (FRANCE, dict(logit_bias={49152: 1.0})), "allowed ids": (FRANCE, dict(allowed_token_ids=[-1])),
    "no allowed ids": (FRANCE, dict(allowed_token_ids=[])), "logprobs": (FRANCE, dict(logprobs=21)), "prompt logprobs": (FRANCE, dict(prompt_logprobs=21)),
    "all logprobs": (FRANCE, dict(logprobs=-1)), "schema": (FRANCE, dict(structured_outputs=StructuredOutputsParams(json="{"))),
    "regex": (FRANCE, dict(structured_outputs=StructuredOutputsParams(regex="("))), "no choice": (FRANCE, dict(structured_outputs=StructuredOutputsParams(choice=[])))}

@case
def bad_calls(llm): return {name: outcome(lambda: ask(llm, *args)) for name, args in BAD_CALLS.items()}

@case
def bad_priorities(llm): return [outcome(lambda: ask(llm, [FRANCE, WATER], GREEDY, priority=[1])), outcome(lambda: ask(llm, FRANCE, GREEDY, priority=[1, 2]))]

@case
def bad_chats(llm):
    chats = dict(empty=[], no_role=[dict(content="x")], text="hello", number=5, no_content=[dict(role="user")])
    return {name: outcome(lambda: talk(llm, x)) for name, x in chats.items()} | dict(
        template=outcome(lambda: talk(llm, FRUITS, chat_template="{% for %}")))

BAD_OPTIONS = [dict(no_such_option=1), dict(dtype="float9"), dict(quantization="magic"), dict(max_model_len=10**6),
               dict(kv_cache_dtype="int3"), dict(scheduling_policy="magic"), dict(tensor_parallel_size=0), dict(gpu_memory_utilization=0)]

@case
def bad_options(llm): return {str(o): outcome(lambda: LLM(MODEL, **OPTIONS | o)) for o in BAD_OPTIONS}

@case
def alive_after_all_that(llm): return greedy(llm, [FRANCE, WATER])


# ---- how close the first choices were to the second: as far as texts can be compared

@case
def gaps(llm):
    found = {}
    for o in ask(llm, [FRANCE, WATER, ONCE, HOT], dict(temperature=0, max_tokens=24, logprobs=2)):
        tops = [sorted((x.logprob for x in p.values()), reverse=True) for p in o.outputs[0].logprobs]
        found[o.prompt] = [round(a - b, 3) for a, b in tops]
    return found


def tell(case, llm):
    try:
        return case(llm)
    except Exception as e:
        return dict(error=type(e).__name__)


def run(llm): return dict(cases={name: tell(case, llm) for name, case in CASES.items()}, n_calls=CALLS.total())


if __name__ == "__main__":
    MODEL = sys.argv[1]
    print("ANSWERS " + json.dumps(run(LLM(MODEL, **OPTIONS))))
