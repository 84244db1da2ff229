"""p-RoPE: rotation of some pairs only, selected by frequency."""

from typing import Literal

import torch

from errors import ModelError
from model.position.schemes.rope import Rope, RotarySettings
from settings.fields import setting


class PRopeSettings(RotarySettings):
    """Rotary positions for the pairs with the highest frequencies only (Barbero et al. 2024)."""

    # Another base could change which pairs are within max_wavelength; scaling does not.
    test_time = RotarySettings.test_time - {"theta"}

    name: Literal["p_rope"] = "p_rope"
    share: float = setting(
        0.75, "fraction p of rotated pairs: those of highest frequency", gt=0, le=1
    )
    reversed: bool = setting(False, "rotate those of lowest frequency instead")
    max_wavelength: float | None = setting(
        None, "longest rotated wavelength, as a multiple of original_length; null: unlimited", gt=0
    )


class PRope(Rope):
    """p-RoPE: θ_k = b^(−2k/r) for the first ⌊p·r/2⌋ pairs, 0 for the rest.

    Barbero et al. 2024 (arXiv:2410.06205). Unlike rope.fraction, the exponents are over all r
    features. Scaling methods apply to the full spectrum, as in RoPE. `max_wavelength: 1` with
    `share: 1` is HoPE, Chen et al. 2024 (arXiv:2410.21216): pairs of λ_k ≤ L0 turn. The threshold
    is from secondary descriptions of the paper.
    """

    settings: PRopeSettings

    def setup(self):
        super().setup()
        if not self.rotated_pairs().any():
            raise ModelError(
                f"p_rope rotates no pair of {self.dims} features: raise share "
                f"({self.settings.share}) or max_wavelength ({self.settings.max_wavelength})"
            )

    def rotated_pairs(self):
        s = self.settings
        spectrum = self.spectrum()
        count = int(s.share * self.dims // 2)
        indices = torch.arange(len(spectrum), device="cpu")
        rotated = indices >= len(spectrum) - count if s.reversed else indices < count
        if s.max_wavelength is not None:
            # The trained frequencies, so that scaling does not change the selection.
            rotated &= 2 * torch.pi / spectrum <= s.max_wavelength * self.geometry.original_length
        return rotated.double()
