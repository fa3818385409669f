"Where pagedlm deliberately says something else than vLLM did: tests/test_vllm_script.py holds it to that, nbs/vllm.ipynb shows it"

REFUSALS = {"VLLMValidationError", "ValidationError", "ValueError", "TypeError", "KeyError", "TemplateSyntaxError"}  # ValueError here
HALF = "bytes that make no character are shown as `�`, at the end too: the text is the decode of all ids"

DIFFERENCES = {  # (case, where in what it tells): (what pagedlm tells, why)
    ("many_languages", "[1].answers[0].text"): ("、アネ�", HALF),
    ("half_a_character", "[0].answers[0].text"): ("���", HALF),
    ("fields_of_an_output", "[3]"): (False, "`metrics` are always there, and cost nothing"),
    ("bad_params", "{'temperature': 2.5}"): ("accepted", "a flat distribution is a distribution"),
    ("bad_calls", "no prompt"): ("ValueError", "`[]` may be no prompt, or a prompt of no ids; an empty batch is more often a mistake"),
    ("bad_chats", "empty"): ("ValueError", "as above"),
    ("bad_chats", "no_content"): ("ValueError", "a message without content is half a message"),
}
