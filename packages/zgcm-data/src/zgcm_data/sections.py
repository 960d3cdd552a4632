"""The sections of a build recipe, each with its defaults."""

from dataclasses import dataclass, field

STAGE_2_SEED = 20260603


@dataclass(frozen=True)
class DatasetRecipe:
    """One of several inputs; its name is the source of documents that name none.

    Args:
        path: A file, a folder, or an address that Daft reads, such as ``s3://bucket/*.parquet``.
        category: Category of documents that name none; empty takes the profile's.
        fields: As in ``InputRecipe``; they come before the profile's.
        text_fields: Likewise.
        profile: Cleaning profile of the documents.
    """

    path: str
    category: str = ""
    fields: dict[str, str] = field(default_factory=dict)
    text_fields: list[str] = field(default_factory=list)
    profile: str = ""


@dataclass(frozen=True)
class InputRecipe:
    """Where documents come from.

    Args:
        path: A file or folder; empty means the embedded default corpus.
        category: Category of documents that name none; empty guesses from the file name.
        on_error: ``"refuse"`` stops at the first bad document, ``"skip"`` counts and reports it.
        default_megabytes: Size to collect when ``path`` is empty.
        fields: Name in the input of ``text``, ``id``, ``source``, ``category`` or ``license``.
        text_fields: Fields that are joined by newlines where a document has no text field.
        profile: Cleaning profile of the documents, see ``zgcm_data.clean.profiles``.
        datasets: Several inputs by name, each with settings of its own, instead of ``path``.
    """

    path: str = ""
    category: str = ""
    on_error: str = "refuse"
    default_megabytes: float = 28.0
    fields: dict[str, str] = field(default_factory=dict)
    text_fields: list[str] = field(default_factory=list)
    profile: str = ""
    datasets: dict[str, DatasetRecipe] = field(default_factory=dict)


@dataclass(frozen=True)
class QualityRecipe:
    """Limits on scores that a classifier gave; nothing here computes a score.

    Args:
        score: Metadata field of the score.
        keep_min: Below it a document goes to review.
        review_min: Below it a document is dropped.
        hard_error_max: Above this ``hard_error`` a document is dropped; negative is off.
        require_score: Whether a missing score goes to review.
    """

    score: str = "quality_score"
    keep_min: float = 0.0
    review_min: float = 0.0
    hard_error_max: int = -1
    require_score: bool = False


@dataclass(frozen=True)
class CleanRecipe:
    """Limits of the cleaning steps, in characters.

    Args:
        min_chars: Shorter texts are dropped.
        max_chars: Longer texts go to review.
        include_review: Train on review documents too.
        require_license: Documents without a license go to review.
        sensitive_terms: Texts that hold one of these go to review.
        quality: Limits on scores by source, else by category, else under ``"default"``.
    """

    min_chars: int = 16
    max_chars: int = 2_000_000
    include_review: bool = False
    require_license: bool = False
    sensitive_terms: list[str] = field(default_factory=list)
    quality: dict[str, QualityRecipe] = field(default_factory=dict)


@dataclass(frozen=True)
class DedupRecipe:
    """MinHash-LSH settings.

    Args:
        bands: Number of LSH bands.
        rows: Hash values in each band.
        ngram: Words (characters, where a script has no spaces) in a shingle.
        threshold: Estimated similarity from which two documents are near duplicates.
        min_shingles: Documents with fewer shingles take part in exact deduplication only.
        exclude_threshold: The same threshold against held-out and stage-1 documents.
    """

    bands: int = 14
    rows: int = 8
    ngram: int = 5
    threshold: float = 0.7
    min_shingles: int = 16
    exclude_threshold: float = 0.5


@dataclass(frozen=True)
class DecontaminateRecipe:
    """Evaluation texts that training must not hold.

    Args:
        paths: JSONL, Parquet or text files, or folders of them.
        text_fields: Fields that are joined where a text has no ``text`` field.
        ngram: Words in an n-gram.
        min_shared: Different n-grams, shared with one evaluation text, from which a document goes.
    """

    paths: list[str] = field(default_factory=list)
    text_fields: list[str] = field(default_factory=list)
    ngram: int = 13
    min_shared: int = 1


@dataclass(frozen=True)
class HeldoutRecipe:
    """The frozen validation sets, one per domain (a domain is a category).

    Args:
        bytes: UTF-8 bytes to aim at in each domain.
        max_document_bytes: Longer documents are not chosen while shorter ones exist.
        max_fraction: Largest part of a domain that may be held out.
        seed: Key of the choice.
    """

    bytes: int = 40_000
    max_document_bytes: int = 8_000
    max_fraction: float = 0.1
    seed: int = 17


@dataclass(frozen=True)
class TokenizerRecipe:
    """The tokenizer, trained here or given.

    Args:
        path: An existing ``tokenizer.json``; empty trains one.
        vocab_size: Entries of a trained tokenizer, specials included.
        sample_bytes: Training text for it, chosen by keyed hash.
        eos: The end-of-document token.
        seed: Key of the sample.
        fim_rate: Part of the code documents that is cut for fill-in-the-middle.
    """

    path: str = ""
    vocab_size: int = 8192
    sample_bytes: int = 6_000_000
    eos: str = "<|endoftext|>"
    seed: int = 23
    fim_rate: float = 0.0


@dataclass(frozen=True)
class CurriculumRecipe:
    """What stage 1 leaves out of its order.

    Args:
        low_quantile: General text below this quantile of complexity is left out.
        high_quantile: General text above this quantile is left out.
        seed: Key of the choice and of the order of the other categories.
    """

    low_quantile: float = 0.005
    high_quantile: float = 0.995
    seed: int = 31


@dataclass(frozen=True)
class StageRecipe:
    """Budget and mixture of one stage.

    Args:
        rows: Rows to write, exactly; 0 takes what the corpus fills (a quarter of it for stage 1).
        shrink: Write fewer rows, instead of refusing, where the corpus cannot fill so many.
        shares: Token share per category; empty takes what the corpus holds.
        max_epochs: How often each document may be used, per category; 1 where not named.
        seed: Key of the global shuffle (stage 2).
    """

    rows: int = 0
    shrink: bool = False
    shares: dict[str, float] = field(default_factory=dict)
    max_epochs: dict[str, int] = field(default_factory=dict)
    seed: int = STAGE_2_SEED


@dataclass(frozen=True)
class LengthStageRecipe:
    """One stage of mid-training.

    Args:
        name: Its folder, such as ``"16k"``.
        sequence_length: Tokens per row that are inputs.
        rows: Rows to write, exactly.
        shares: Upper bound of a length band, as text, to its part of the tokens.
    """

    name: str
    sequence_length: int
    rows: int
    shares: dict[str, float]


@dataclass(frozen=True)
class MidtrainRecipe:
    """Stages of growing length, instead of the two stages of pretraining (leave those out by ``exclude_builds``).

    Args:
        stages: In the order in which they are trained; none means a build for pretraining.
        bounds: Upper bounds of the length bands in tokens, ascending; longer documents are not used.
        seed: Key of the choice and of the shuffle.
    """

    stages: list[LengthStageRecipe] = field(default_factory=list)
    bounds: list[int] = field(default_factory=lambda: [16_384, 65_536, 262_144])
    seed: int = 37
