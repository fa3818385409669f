"Packaging from settings.ini, so that version, metadata and requirements are written once."
import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LICENSES = {"apache2": "Apache-2.0", "mit": "MIT", "bsd3": "BSD-3-Clause"}
STATUS = {"1": "1 - Planning", "2": "2 - Pre-Alpha", "3": "3 - Alpha", "4": "4 - Beta",
          "5": "5 - Production/Stable"}

ini = ConfigParser(delimiters=["="])
ini.read(HERE/"settings.ini", encoding="utf-8")
c = ini["DEFAULT"]
# `dev_requirements = …` is the extra `dev`, and so on
extras = {k.removesuffix("_requirements"): v.split() for k, v in c.items() if k.endswith("_requirements")}
extras["dev"] += extras["cluster"] + extras["grammar"] + extras["serve"] # the checks leave nothing out
data = sorted({d.parent.name for d in (HERE/c["lib_path"]).glob("*/*") if d.suffix != ".pyc"})
# on a package index, README.md's links between files of the repository lead to the repository
readme = (HERE/"README.md").read_text(encoding="utf-8")
at = f"{c['git_url']}/{{}}/{c['branch']}/"
readme = re.sub(r'(!\[[^\]]*\]\(|src="|srcset=")(?!\w+:)', lambda m: m[1] + at.format("raw"), readme)
readme = re.sub(r"(?<!!)(\[[^\[\]]*\]\()(?!\w+:|#)", lambda m: m[1] + at.format("blob"), readme)

setup(
    name=c["lib_name"],
    version=c["version"],
    description=c["description"],
    keywords=c["keywords"].split(),
    long_description=readme,
    long_description_content_type="text/markdown",
    author=c["author"],
    author_email=c["author_email"],
    url=c["git_url"],
    project_urls={"Documentation": c["doc_host"] + c["doc_baseurl"]},
    license=LICENSES[c["license"]],
    classifiers=[f"Development Status :: {STATUS[c['status']]}", "Intended Audience :: Developers",
                 "Programming Language :: Python :: 3",
                 "Topic :: Scientific/Engineering :: Artificial Intelligence"],
    python_requires=f">={c['min_python']}",
    packages=[c["lib_path"], *(f"{c['lib_path']}.{d}" for d in data)], # folders of data count as packages
    install_requires=c["requirements"].split(),
    extras_require=extras,
    entry_points={"console_scripts": c["console_scripts"].split("\n"),
                  "nbdev": [f"{c['lib_path']}={c['lib_path']}._modidx:d"]},
    include_package_data=True,
    zip_safe=False,
)
