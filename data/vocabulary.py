"""One integer space for text and vision: text ids first, then vision codes, then `<eof>` and `<eov>`.

A frame is its n codes; `<eof>` ends every frame but the last, `<eov>` ends the last frame of a video or a single
image (arXiv 2402.08268, section 4), so a clip of T frames takes T * (n + 1) ids. The 7B model has 32000 text ids,
8192 codes and 256 ids reserved after them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Vocabulary:
    """Sizes of the two halves of the id space.

    text_size: number of text ids, 0 .. text_size - 1.
    num_codes: number of vision codes (the codebook's size); 0 for a text-only vocabulary.
    vision_size: number of vision ids, at least num_codes + 2; 0 for a text-only vocabulary.
    """

    text_size: int
    num_codes: int = 0
    vision_size: int = 0

    def __post_init__(self) -> None:
        if self.text_size < 1:
            raise ValueError(f"vocabulary.text_size is {self.text_size}; it must be at least 1")
        if self.num_codes < 0:
            raise ValueError(f"vocabulary.num_codes is {self.num_codes}; it must be 0 (text only) or more")
        if self.num_codes == 0 and self.vision_size != 0:
            raise ValueError(f"vocabulary.vision_size is {self.vision_size} without codes; set num_codes, or both to 0")
        if self.num_codes > 0 and self.vision_size < self.num_codes + 2:
            raise ValueError(
                f"vocabulary.vision_size is {self.vision_size}; it must be at least num_codes + 2 = "
                f"{self.num_codes + 2}, so that <eof> and <eov> have ids"
            )

    @property
    def size(self) -> int:
        """Number of ids, text and vision together."""
        return self.text_size + self.vision_size

    @property
    def has_vision(self) -> bool:
        return self.num_codes > 0

    @property
    def eof(self) -> int:
        """Id of `<eof>`, which ends every frame but the last."""
        self._need_vision()
        return self.text_size + self.num_codes

    @property
    def eov(self) -> int:
        """Id of `<eov>`, which ends the last frame of a video, or an image."""
        return self.eof + 1

    def is_vision(self, ids: ArrayLike) -> NDArray[np.bool_]:
        """Which ids are vision ids (codes, `<eof>`, `<eov>`); bool, of the shape of `ids`."""
        return np.asarray(ids) >= self.text_size

    def vision_tokens(self, codes: ArrayLike) -> NDArray[np.int32]:
        """Codes [T, n] (0 .. num_codes - 1) of a clip, or of an image when T is 1, as ids int32 [T * (n + 1)]."""
        self._need_vision()
        codes_Tn = np.asarray(codes)
        if codes_Tn.ndim != 2 or 0 in codes_Tn.shape or not np.issubdtype(codes_Tn.dtype, np.integer):
            raise ValueError(
                f"codes are {codes_Tn.dtype} of shape {codes_Tn.shape}; they must be integers of shape "
                "[frames, codes per frame], both at least 1"
            )
        low, high = int(codes_Tn.min()), int(codes_Tn.max())
        if low < 0 or high >= self.num_codes:
            raise ValueError(f"codes run from {low} to {high}; this vocabulary has codes 0 to {self.num_codes - 1}")
        num_frames, num_per_frame = codes_Tn.shape
        ids = np.full((num_frames, num_per_frame + 1), self.eof, np.int32)
        ids[:, :-1] = codes_Tn + self.text_size
        ids[-1, -1] = self.eov
        return ids.reshape(-1)

    def split_frames(self, ids: ArrayLike) -> NDArray[np.int32]:
        """Inverse of `vision_tokens`: ids [T * (n + 1)] -> codes int32 [T, n]; ValueError when they are malformed."""
        self._need_vision()
        flat = np.asarray(ids)
        if flat.ndim != 1 or flat.size == 0 or not np.issubdtype(flat.dtype, np.integer):
            raise ValueError(
                f"vision ids are {flat.dtype} of shape {flat.shape}; they must be integers in one dimension"
            )
        if int(flat[-1]) != self.eov:
            raise ValueError(f"vision ids end in {int(flat[-1])}; they must end in <eov>, which is {self.eov}")
        (ends,) = np.nonzero((flat == self.eof) | (flat == self.eov))
        num_per_frame = int(ends[0])
        expected = np.arange(1, ends.size + 1) * (num_per_frame + 1) - 1
        if num_per_frame == 0 or not np.array_equal(ends, expected):
            raise ValueError(
                f"vision ids have <eof> or <eov> at {ends[:8].tolist()}; frames must all have the same number of codes"
            )
        frames = flat.reshape(ends.size, num_per_frame + 1)
        if ends.size > 1 and bool((frames[:-1, -1] != self.eof).any()):
            raise ValueError("vision ids have <eov> before the last frame; they must hold one clip")
        codes = frames[:, :-1] - self.text_size
        if bool((codes < 0).any()) or bool((codes >= self.num_codes).any()):
            raise ValueError(
                f"vision ids must lie in {self.text_size} .. {self.text_size + self.num_codes - 1} between frame ends; "
                f"found {int(frames[:, :-1].min())} .. {int(frames[:, :-1].max())}"
            )
        return codes.astype(np.int32)

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    def _need_vision(self) -> None:
        if not self.has_vision:
            raise ValueError("this vocabulary is text only (num_codes is 0); it has no vision ids")
