"Reference entries for what a module exports, read from its source alone: nothing is imported or run."
import ast
import io
import re
import tokenize
from pathlib import Path

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
SHOWN_DUNDERS = ("__call__", "__len__", "__iter__", "__getitem__", "__contains__")


def plain(
    text:str, # words from a comment or docstring
)->str:       # the same words as Markdown that shows them, fit for a table cell
    "Escape what Markdown would take for markup, except in `code`"
    parts = re.split(r"(`[^`]*`)", text)
    escaped = (p if p[:1] == "`" else re.sub(r"([\\*_\[\]<>$])", r"\\\1", p) for p in parts)
    return "".join(escaped).replace("|", r"\|")


def code(
    text:str, # Python
)->str:       # it as an inline code span, fit for a table cell
    "Quote code; a span cannot hold backticks"
    return "`" + text.replace("`", "'").replace("|", r"\|") + "`" if text else ""


def comments_of(
    source:str, # a module
)->dict:        # line number -> words of the comment there
    "Find comments; docments are the comments beside parameters"
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ").rstrip() for t in found if t.type == tokenize.COMMENT}


class Module:
    "The exported functions and classes of one module, each as Markdown"
    def __init__(
        self,
        path:Path, # a module's file
        url:str,   # where its source is shown, without the line
    ):
        source = path.read_text(encoding="utf-8")
        self.url, self.tree, self.comments = url, ast.parse(source), comments_of(source)
        self.exported = self._exported()

    def _exported(self):
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                return ast.literal_eval(node.value)
        return []

    def markdown(self)->str:
        "All entries, functions and classes in the order of the module"
        kinds = (*FUNCTION, ast.ClassDef)
        nodes = [n for n in self.tree.body if isinstance(n, kinds) and n.name in self.exported]
        lower = [n.name.lower() for n in nodes]
        twice = {name for name in lower if lower.count(name) > 1} # `roofline` and `Roofline`
        parts = [self.entry(n, n.name.lower() in twice) for n in nodes]
        rest = [f"`{name}`" for name in self.exported if name not in {n.name for n in nodes}]
        if rest:
            parts.append("Also exported, as values: " + ", ".join(rest) + ".")
        return "\n\n".join(parts)

    def entry(self, node, shared=False)->str:
        "One function or class: heading, signature, link to the source, table"
        is_class = isinstance(node, ast.ClassDef)
        kind = "class " if is_class else ""
        head = f"### {node.name} {{#{node.name.lower()}{'-class' if shared and is_class else ''}}}"
        link = f'[source]({self.url}#L{node.lineno}){{.api-source}}'
        rows = self.fields(node) if is_class else self.parameters(node)
        names = [r[0] for r in rows if r[0] != "Returns"]
        shown = f"{node.name}({', '.join(names) if len(names) <= 10 else '…'})"
        told = plain(ast.get_docstring(node) or "")
        silent = not is_class and not any(r[3] for r in rows) # a kernel's pointers: all is said above
        lines = [head, "::: {.api}", f"`{kind}{shown}` {link}", told, "" if silent else table(rows)]
        if is_class:
            lines.append(self.methods(node))
        return "\n\n".join(line for line in lines if line) + "\n\n:::"

    def parameters(self, fn)->list:
        "Rows (name, type, default, meaning) of a function's parameters, and one for what it returns"
        a = fn.args
        named = a.posonlyargs + a.args
        pairs = list(zip(named, [None] * (len(named) - len(a.defaults)) + a.defaults))
        pairs += [(a.vararg, None)] if a.vararg else []
        pairs += zip(a.kwonlyargs, a.kw_defaults)
        pairs += [(a.kwarg, None)] if a.kwarg else []
        lines = [arg.lineno for arg, _ in pairs]
        rows = []
        for arg, default in pairs:
            if arg.arg in ("self", "cls"):
                continue
            star = "*" if arg is a.vararg else "**" if arg is a.kwarg else ""
            alone = lines.count(arg.lineno) == 1 and arg.lineno < fn.body[0].lineno
            rows.append((star + arg.arg, unparse(arg.annotation), unparse(default),
                         self.comments.get(arg.lineno, "") if alone else ""))
        # the line that closes the list of parameters tells what comes back
        ends = range(max(lines, default=fn.lineno) + 1, fn.body[0].lineno)
        told = next((self.comments[line] for line in ends if line in self.comments), "")
        kind = unparse(fn.returns)
        if told or kind not in ("", "None"):
            rows.append(("Returns", kind, "", told))
        return rows

    def fields(self, cls)->list:
        "Rows of a dataclass's or named tuple's fields, else of `__init__`'s parameters"
        init = [n for n in cls.body if isinstance(n, FUNCTION) and n.name == "__init__"]
        if init:
            return [r for r in self.parameters(init[0]) if r[0] != "Returns"]
        return [(n.target.id, unparse(n.annotation), unparse(n.value), self.comments.get(n.lineno, ""))
                for n in cls.body if isinstance(n, ast.AnnAssign)]

    def methods(self, cls)->str:
        "A table of a class's public methods and properties"
        found = []
        for n in cls.body:
            if not isinstance(n, FUNCTION) or (n.name[0] == "_" and n.name not in SHOWN_DUNDERS):
                continue
            rows = self.parameters(n)
            args = ", ".join(r[0] for r in rows if r[0] != "Returns")
            is_property = any(unparse(d).endswith("property") for d in n.decorator_list)
            name = n.name if n.name.startswith("__") else f".{n.name}"
            told = [plain(ast.get_docstring(n) or "")]
            told += [f"{code(r[0])}: {plain(r[3])}" for r in rows if r[3]]
            shown = code(name if is_property else f"{name}({args})")
            found.append((shown, "<br>".join(t for t in told if t)))
        if not any(told for _, told in found):
            return "Methods: " + ", ".join(name for name, _ in found) if found else ""
        lines = [f"| {name} | {told} |" for name, told in found]
        return "\n".join(["| Method | Meaning |", "|---|---|", *lines])


def unparse(
    node, # part of a syntax tree, or None
)->str:
    "The code of a node; nothing for None"
    return ast.unparse(node) if node is not None else ""


def table(
    rows:list, # (name, type, default, meaning)
)->str:        # a Markdown table without its empty columns
    "Parameters as a table; none when there is nothing to say beyond the names"
    titles = ("Parameter", "Type", "Default", "Meaning")
    keep = [0] + [i for i in (1, 2, 3) if any(r[i] for r in rows)]
    if keep == [0]:
        return ""
    lines = ["| " + " | ".join(titles[i] for i in keep) + " |", "|" + "---|" * len(keep)]
    for r in rows:
        cells = ["*Returns*" if r[0] == "Returns" else code(r[0]), code(r[1]), code(r[2]), plain(r[3])]
        lines.append("| " + " | ".join(cells[i] for i in keep) + " |")
    return "\n".join(lines)
