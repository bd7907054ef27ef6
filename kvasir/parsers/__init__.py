"""Parsers turn the text that a model writes into parts: content, reasoning and tool calls. API process.

formats.py has the table of formats; scanner.py reads answers by it, and grammar.py holds answers to it.
"""
