__version__ = "0.1.0"

_LAZY = {"LLM": "llm", "SamplingParams": "core"}
__all__ = ["LLM", "SamplingParams", "__version__"]

def __getattr__(name):
    "Load `LLM` and `SamplingParams` on first use, so that `import pagedlm` is instant"
    if name not in _LAZY: raise AttributeError(f"module 'pagedlm' has no attribute {name!r}")
    from importlib import import_module
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)

def __dir__(): return __all__
