"""The types of quantised blocks that blocks.c multiplies, by GGUF's names. No torch."""

FORMS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""In blocks.h's order."""
