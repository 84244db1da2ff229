"""What the numbers of an evaluation of any kind depend on, and where they come from."""


def basis(result) -> dict:
    """The settings, methods and hashes that the numbers of a `result` depend on."""
    facts = ("command", "changed", "finished", "tokenizer_hash", "corpus_hash", "corpus")
    return {
        "protocol": result.settings.protocol,
        "trained_length": result.subject.trained_length,
        "confidence": result.settings.confidence,
        "checkpoint": result.subject.name,
        "checkpoint_step": result.subject.step,
        "checkpoint_hash": result.subject.checkpoint_hash,
        "dtype": result.settings.dtype,
        "seed": result.settings.seed,
        **{key: result.facts[key] for key in facts if key in result.facts},
        "settings": result.settings.model_dump(mode="json"),
        "methods": {
            method.label: {
                "overrides": list(method.overrides),
                "position": result.schemes[method.label],
            }
            for method in result.methods
        },
    }


def text_basis(result) -> dict:
    """The same for an evaluation of text without stored cells (attention, generation)."""
    return {
        **basis(result),
        "documents": result.documents,
        "units": len(set(result.unit.tolist())),
        "unit": result.unit_kind,
        "bos": result.settings.bos,
    }
