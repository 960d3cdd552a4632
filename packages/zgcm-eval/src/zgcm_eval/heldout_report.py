"""The figures of a held-out evaluation and the document scores behind them; formulas in ``heldout``."""

import hashlib
import math
from dataclasses import astuple, dataclass
from typing import Any

from zgcm_eval.metrics import Metric

FORMAT = "zgcm-heldout-report/1"
"""Value of ``format`` in a report."""


def perplexity(loss: float) -> float:
    """The perplexity of a loss in nats per token; infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def bits(nats: float) -> float:
    """Nats in bits."""
    return nats / math.log(2)


@dataclass(frozen=True)
class DocumentScore:
    """The score of one document: what a paired comparison needs."""

    id: str
    tokens: int
    bytes: int
    nats: float
    """Negative log-likelihood of the whole document."""


@dataclass(frozen=True)
class DomainResult:
    """The scores of one domain and the figures that follow from them."""

    name: str
    sha256: str
    documents: tuple[DocumentScore, ...]

    @property
    def tokens(self) -> int:
        """Scored tokens."""
        return sum(document.tokens for document in self.documents)

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the raw texts."""
        return sum(document.bytes for document in self.documents)

    @property
    def nats(self) -> float:
        """Negative log-likelihood of all documents."""
        return math.fsum(document.nats for document in self.documents)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """``exp(loss)``."""
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte of raw text."""
        return bits(self.nats) / self.bytes

    def bits_per_byte_metric(self) -> Metric:
        """Bits per byte with the bits and bytes of each document."""
        units = tuple(f"{number}/{document.id}" for number, document in enumerate(self.documents))
        values = tuple(bits(document.nats) for document in self.documents)
        weights = tuple(float(document.bytes) for document in self.documents)
        return Metric(f"{self.name}: bits per byte", units, values, weights, False)

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON types; an infinite perplexity is null. Documents are counted, not listed."""
        return {
            "documents": len(self.documents),
            "tokens": self.tokens,
            "bytes": self.bytes,
            "loss": self.loss,
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "bits_per_byte": self.bits_per_byte,
            "sha256": self.sha256,
        }


@dataclass(frozen=True)
class HeldoutReport:
    """The result of one model on held-out sets, with all that decides the figures."""

    domains: tuple[DomainResult, ...]
    prefix_id: int
    context: int
    overlap: int
    windows: int

    @property
    def digest(self) -> str:
        """The SHA-256 of the domains' names and digests: two reports with the same one saw the same texts."""
        names = "".join(f"{domain.name}\0{domain.sha256}\0" for domain in self.domains)
        return hashlib.sha256(names.encode("utf-8")).hexdigest()

    @property
    def total(self) -> DomainResult:
        """All domains taken as one; a domain of many bytes weighs more."""
        documents = tuple(document for domain in self.domains for document in domain.documents)
        return DomainResult("total", self.digest, documents)

    def domain(self, name: str) -> DomainResult:
        """The result of one domain.

        Args:
            name: the domain.

        Returns:
            Its result.

        Raises:
            ValueError: there is no such domain.
        """
        for result in self.domains:
            if result.name == name:
                return result
        raise ValueError(f"no domain {name!r} in this report; it has {[d.name for d in self.domains]}")

    def conditions(self) -> dict[str, object]:
        """What two reports must share to be compared; the tokenizer may differ."""
        return {"digest": self.digest, "context": self.context, "overlap": self.overlap}

    def metrics(self) -> list[Metric]:
        """Bits per byte of each domain and of all, with their documents."""
        return [domain.bits_per_byte_metric() for domain in (*self.domains, self.total)]

    def rows(self) -> list[dict[str, Any]]:
        """One row per domain and one for all."""
        return [{"domain": domain.name, **domain.as_dict()} for domain in (*self.domains, self.total)]

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON types; ``from_dict`` gives the report back."""
        return {
            "format": FORMAT,
            "digest": self.digest,
            "prefix_id": self.prefix_id,
            "prefixes_per_window": 1,
            "context": self.context,
            "overlap": self.overlap,
            "windows": self.windows,
            "domains": {domain.name: domain.as_dict() for domain in self.domains},
            "total": self.total.as_dict(),
            "documents": {
                domain.name: [list(astuple(d)) for d in domain.documents] for domain in self.domains
            },
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "HeldoutReport":
        """Read what ``as_dict`` wrote.

        Args:
            record: the JSON object.

        Returns:
            The report.

        Raises:
            ValueError: it is of another format, or its figures do not follow from its documents.
        """
        if record.get("format") != FORMAT:
            raise ValueError(f"format is {record.get('format')!r}; a held-out report has {FORMAT!r}")
        domains = tuple(
            DomainResult(name, figures["sha256"], tuple(DocumentScore(*d) for d in record["documents"][name]))
            for name, figures in record["domains"].items()
        )
        report = cls(domains, record["prefix_id"], record["context"], record["overlap"], record["windows"])
        if report.as_dict() != record:
            raise ValueError(f"the figures of report {record['digest']!r} do not follow from its documents")
        return report
