"""What is this process doing? `eyas why` looks at any training process from outside and says so, with its evidence.

    target -> probe (here or over ssh) -> snapshot -> facts + log -> wait chain -> verdicts -> answer

Nothing here imports torch, transformers or numpy: asking must be cheap on a host that is already in trouble.
"""
