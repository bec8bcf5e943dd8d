"""Why each finding about data matters, and what mends it."""

_LOOSE = "the batch of such samples cannot be put together, or the model fails on it"

ADVICE: dict[str, tuple[str, str]] = {
    "sample.kills": (
        "native code that reads it crashes or runs out of memory, and training would end there",
        "read this sample by hand to see why; leave it out in dataset()",
    ),
    "sample.unreadable": (
        "training stops at the first such sample",
        "mend the data, or set data.clean: [drop_unreadable]",
    ),
    "sample.missing": (
        "a batch with None in it cannot be put together",
        "fill the value in __getitem__, or set data.clean: [drop_missing]",
    ),
    "sample.non_finite": (
        "one NaN or Inf makes the loss and then every weight NaN",
        "mend the values, or set data.clean: [drop_missing]",
    ),
    "sample.keys": (_LOOSE, "return the same fields for every index"),
    "sample.type": (_LOOSE, "return the same type for every index"),
    "sample.dtype": (_LOOSE, "convert to one type in __getitem__"),
    "sample.shape": (_LOOSE, "pad or crop in __getitem__, or give the task a collate(samples) that does"),
    "duplicates.exact": (
        "repeated samples count more than others and are learned by heart",
        "data.clean: [drop_duplicates] leaves the first of each",
    ),
    "duplicates.near": (
        "they count more than others, as exact copies do",
        "look at some of them; drop what is no new fact",
    ),
    "label.conflict": ("what is learned from the one is unlearned from the other", "look at them and mend the labels"),
    "leakage": (
        "validation then measures what was learned by heart",
        "take them out of one of the two; split before copying or augmenting",
    ),
    "feature.constant": ("it carries no information", "drop it, or look why it was not filled"),
    "feature.scale": (
        "large inputs make large gradients, and training diverges or learns only from them",
        "normalise: subtract the mean and divide by the deviation, or take the logarithm",
    ),
    "text.utf8": ("the bytes are no text, or were decoded as another encoding", "decode with the right encoding"),
    "text.empty": ("nothing can be learned from it, and its loss may be NaN", "leave it out in dataset()"),
    "length.outlier": (
        "one long sample decides how much memory a batch takes",
        "cut it, or give the task size(sample) so that the longest is tried first",
    ),
    "label.range": (
        "the loss fails on it; on a GPU with an assertion that names nothing",
        "labels are whole numbers from 0 to the number of the model's outputs less one",
    ),
    "id.range": (
        "the look-up fails on it; on a GPU with an assertion that names nothing",
        "enlarge the embedding, or mend the ids",
    ),
    "label.type": ("classes are whole numbers", "return int from label(); for regression leave label() out"),
    "label.unknown": ("label(sample) is asked for every sample", "mend label(), or the sample"),
    "label.single": ("there is nothing to tell apart", "look at how the labels are read"),
    "label.absent": (
        "the model has outputs that are never right, or labels do not start at 0",
        "number the classes 0, 1, 2, ...",
    ),
    "label.imbalance": (
        "the model may do well by never naming the rare class",
        "data.imbalance: auto; and judge by balanced accuracy",
    ),
    "label.unseen": ("they cannot be learned", "split each class in proportion"),
}
