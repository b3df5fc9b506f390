"""An agent's learner: picks the arithmetic of this package for each model (`labeler.records.Learner`).

Modules are loaded on first use: most agents never train.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from feature_store.results.models import StoredModel, model_of_bytes
from feature_store.rows import refuse_other_probe
from labeler.errors import BadData, InvalidSetting, MixedShards
from labeler.methods.aux_distill import NEGATIVES_EVERY, LocalHeadTerms
from labeler.methods.blind_average import LinearTerms, MeanTerms
from labeler.methods.ensemble import VoterTerms
from labeler.methods.federated import StepTerms
from labeler.randomness import ByteSource
from labeler.records import FEATURE_ONE, PublicAxes, Rows
from labeler.setting import PLAIN, Training

if TYPE_CHECKING:
    from workers.learning.private_heads import PublicMap

HEAD_SHARPNESS, SCORE_SHARPNESS = 3.0, 8.0
"""Factors on the scores before they become probabilities: heads fitted under strong regularization are timid. They cost
no privacy, and did best on CIFAR-10 in `labeler bench papers fedauxfdp`."""


class Trainer:
    """A learner that fits models to an agent's records.

    Args:
        probe: features of a public probe by the records' backbone, if that is a declared one
            (`feature_store.rows.probe_text`).
    """

    def __init__(self, probe: str | None = None) -> None:
        self._probe = probe

    def voter(self, records: Rows, questions: NDArray[np.int16] | None, *, terms: VoterTerms) -> NDArray[np.int64]:
        """See Learner."""
        from workers.learning import linear, network

        if terms.learner == PLAIN:
            return linear.train_head(records, num_classes=terms.num_classes, is_several=terms.is_several)
        return network.train(records, questions, num_classes=terms.num_classes, is_several=terms.is_several)

    def predictions(
        self, voter: NDArray[np.int64], questions: NDArray[np.int16], *, terms: VoterTerms
    ) -> NDArray[np.int64]:
        """See Learner."""
        from workers.learning import linear, network

        score = linear.head_scores if terms.learner == PLAIN else network.scores
        return linear.said(voter, questions, score=score, numbers=terms.num_classes, is_several=terms.is_several)

    def weights(self, records: Rows, *, terms: LinearTerms, axes: PublicAxes | None) -> NDArray[np.float64]:
        """See Learner."""
        from workers.learning import linear

        return linear.train_rows(records, terms=terms, axes=axes)

    def class_sums(self, records: Rows, *, terms: MeanTerms, axes: PublicAxes) -> NDArray[np.float64]:
        """See Learner."""
        from workers.learning.linear import class_sums

        return class_sums(records, terms=terms, axes=axes)

    def soft_votes(
        self, records: Rows, questions: NDArray[np.int16], *, terms: LocalHeadTerms, source: ByteSource
    ) -> NDArray[np.float64]:
        """See Learner."""
        from workers.learning.private_heads import fit_rows

        features = questions.astype(np.float32) / FEATURE_ONE
        maps = _maps(questions.tobytes(), questions.shape, terms)
        fitted = fit_rows(records, features[::NEGATIVES_EVERY], terms=terms, maps=maps)
        heads = fitted.released(terms, source=source)
        return heads.soft_votes(features, head_sharpness=HEAD_SHARPNESS, score_sharpness=SCORE_SHARPNESS)

    def check_negatives(self, questions: NDArray[np.int16], terms: LocalHeadTerms) -> None:
        """See Learner."""
        _ = _maps(questions.tobytes(), questions.shape, terms)

    def step(
        self,
        records: Rows,
        model: NDArray[np.float64],
        *,
        terms: StepTerms,
        axes: PublicAxes | None,
        training: Training,
        source: ByteSource,
    ) -> NDArray[np.float64]:
        """See Learner."""
        from workers.learning import linear

        sampled = training.sampled
        if sampled is None:
            raise InvalidSetting("the task does not say how it samples (training.sampled)")
        if sampled.unit == "record":
            blocks = linear.rows_on_grid(records, axes, num_classes=terms.num_classes)
            return linear.sampled_gradients(blocks, records.count, model, terms=terms, source=source)
        return linear.clipped_update(
            records,
            model,
            terms=terms,
            axes=axes,
            rate=sampled.learning_rate,
            shrink=training.regularisation,
            local_steps=sampled.local_steps,
            source=source,
        )

    def check_model(self, model: bytes, *, classes: Sequence[str], fingerprint: str, dimension: int) -> None:
        """See Learner.

        Raises:
            BadData: no model of ours.
            MixedShards: see `StoredModel.check_fits`. Two backbones of one declared name differ in their
                features of the probe.
        """
        stored = _model(model)
        stored.check_fits(classes, fingerprint=fingerprint, dimension=dimension)
        if self._probe and stored.probe:
            try:
                refuse_other_probe(
                    stored.probe,
                    self._probe,
                    dimension,
                    first_name="the job of the evaluated model",
                    other_name="this site",
                )
            except BadData as error:
                raise MixedShards(str(error)) from None

    def opinions(self, model: bytes, features: NDArray[np.int16]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """See Learner.

        One row lies alone in one place of memory while it is scored, in a time that does not depend on it
        (labeler.steady). A model of no numbers, which `check_model` refuses, says class 0 at confidence NaN of all.
        """
        stored = _model(model)
        predicted = np.zeros(len(features), dtype=np.int64)
        confidence = np.full(len(features), np.nan)
        row = np.empty((1, features.shape[1]), dtype=np.int16)
        with np.errstate(all="ignore"):
            for number in range(len(features)):
                row[0] = features[number]
                predicted[number], confidence[number] = _opinion(stored, row)
        return predicted, confidence


def _opinion(model: StoredModel, row: NDArray[np.int16]) -> tuple[int, float]:
    try:
        said = model.predict_proba(row)[0]
        if np.isfinite(said).all():
            return int(said.argmax()), float(said.max())
    except Exception:  # see opinions
        pass
    return 0, float("nan")


@lru_cache(maxsize=2)
def _model(data: bytes) -> StoredModel:
    """A model that is evaluated, read once for the check and the answer."""
    return model_of_bytes(data, name="the question")


@lru_cache(maxsize=2)
def _maps(questions: bytes, shape: tuple[int, ...], terms: LocalHeadTerms) -> tuple[PublicMap, PublicMap]:
    """Return the public maps in front of both heads, made once for the check and the answer."""
    from workers.learning.private_heads import public_maps

    features = np.frombuffer(questions, dtype=np.int16).reshape(shape).astype(np.float32) / FEATURE_ONE
    return public_maps(features[::NEGATIVES_EVERY], terms=terms)
