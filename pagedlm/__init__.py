__version__ = "0.1.0"

_LAZY = { # name -> the module that has it
    "SamplingParams": "core", "RequestOutputKind": "core", "StructuredOutputsParams": "core", "LLM": "llm",
    "RequestOutput": "llm", "CompletionOutput": "llm", "Logprob": "llm", "TextPrompt": "llm", "TokensPrompt": "llm"}
__all__ = [*_LAZY, "__version__"]

def __getattr__(name):
    "Load a part on first use, so that `import pagedlm` is instant"
    if name not in _LAZY: raise AttributeError(f"module 'pagedlm' has no attribute {name!r}")
    return getattr(_load(_LAZY[name]), name)

def _load(module):
    "Import a part with Python's cycle collector paused, which would walk torch's objects again and again"
    import atexit
    import gc
    from importlib import import_module
    on = gc.isenabled()
    gc.disable()
    try: return import_module(f".{module}", __name__)
    finally:
        gc.freeze() # what was imported stays: later collections need not look at it
        atexit.register(gc.unfreeze)
        if on: gc.enable()

def __dir__(): return __all__
