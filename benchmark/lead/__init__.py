"""The group ``lead`` on SGLang 0.5.23, part by part, beside that release alone (``README.md``)."""
