"""The paper's 22 equations in TeX, by section, for the page "The paper in code"."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Equation:
    """An equation of the paper, under the paper's number."""

    number: int
    tex: str
    words: str  # what it says, and what this package adds


@dataclass(frozen=True)
class Section:
    """A section of the paper, and its equations."""

    title: str
    equations: tuple[Equation, ...]


def _gate(number: int, gate: str, state: str, words: str) -> Equation:
    """Return the equation of a gate, which reads the input, the output before it and a state."""
    weights = " + ".join(
        rf"W_{{{source}{gate}}} {vector}"
        for source, vector in (("i", "i_n"), ("h", "h_{n-1}"), ("s", state))
    )
    return Equation(number, rf"{gate}_n = \sigma\left({weights}\right)", words)


def _gradient(number: int, vector: str, index: str, last: str, words: str) -> Equation:
    """Return the gradient with respect to f or g, a sum over the other index."""
    first = "0" if index == "u" else "1"
    tex = (
        rf"\frac{{\partial L}}{{\partial {vector}^k}} = \sum_{{{index}={first}}}^{{{last}}} "
        rf"\sum_{{j}} \frac{{\partial L}}{{\partial \Pr(j|t,u)}} "
        rf"\frac{{\partial \Pr(j|t,u)}}{{\partial {vector}^k}}"
    )
    return Equation(number, tex, words)


SECTIONS = (
    Section(
        "Alignments",
        (
            Equation(
                1,
                r"\Pr(y|x) = \sum_{a \in \mathcal{B}^{-1}(y)} \Pr(a|x)",
                "An output has the probability of all alignments that become it when ℬ removes "
                "their nulls. Only the tests enumerate them: Eq. 17 is the same sum.",
            ),
        ),
    ),
    Section(
        "Prediction network",
        (
            Equation(
                2,
                r"h_u = \mathcal{H}\left(W_{ih} \hat{y}_u + W_{hh} h_{u-1} + b_h\right)",
                "One hidden layer reads the labels, null first. The function is the LSTM below.",
            ),
            Equation(3, r"g_u = W_{ho} h_u + b_o", "The prediction vector, one number an output."),
        ),
    ),
    Section(
        "Long Short-Term Memory with peepholes",
        (
            _gate(4, r"\alpha", "s_{n-1}", "The input gate."),
            _gate(5, r"\beta", "s_{n-1}", "The forget gate."),
            Equation(
                6,
                r"s_n = \beta_n s_{n-1} + \alpha_n \tanh\left(W_{is} i_n + W_{hs} h_{n-1}\right)",
                "The state. The paper prints its last term without h.",
            ),
            _gate(7, r"\gamma", "s_n", "The output gate, which sees the new state."),
            Equation(8, r"h_n = \gamma_n \tanh(s_n)", "The output of the layer."),
        ),
    ),
    Section(
        "Transcription network",
        (
            Equation(
                9,
                r"\overleftarrow{h}_t = \mathcal{H}\left(W_{i\overleftarrow{h}} i_t + "
                r"W_{\overleftarrow{h}\overleftarrow{h}} \overleftarrow{h}_{t+1} + "
                r"b_{\overleftarrow{h}}\right)",
                "The layer that reads the input from its end.",
            ),
            Equation(
                10,
                r"\overrightarrow{h}_t = \mathcal{H}\left(W_{i\overrightarrow{h}} i_t + "
                r"W_{\overrightarrow{h}\overrightarrow{h}} \overrightarrow{h}_{t-1} + "
                r"b_{\overrightarrow{h}}\right)",
                "The layer that reads it from its beginning.",
            ),
            Equation(
                11,
                r"o_t = W_{\overrightarrow{h}o} \overrightarrow{h}_t + "
                r"W_{\overleftarrow{h}o} \overleftarrow{h}_t + b_o",
                "The transcription vector f is this output.",
            ),
        ),
    ),
    Section(
        "Output distribution",
        (
            Equation(
                12,
                r"h(k,t,u) = \exp\left(f_t^k + g_u^k\right)",
                "The density of output k at a node of the lattice, in logarithms a sum.",
            ),
            Equation(
                13,
                r"\Pr(k|t,u) = \frac{h(k,t,u)}{\sum_{j} h(j,t,u)}",
                "Its share of all densities: a softmax over the labels and null.",
            ),
            Equation(14, r"y(t,u) \equiv \Pr(y_{u+1}|t,u)", "The arrow up: emit the next label."),
            Equation(
                15, r"\varnothing(t,u) \equiv \Pr(\varnothing|t,u)", "The arrow right: emit null."
            ),
        ),
    ),
    Section(
        "Forward and backward variables",
        (
            Equation(
                16,
                r"\alpha(t,u) = \alpha(t-1,u)\,\varnothing(t-1,u) + \alpha(t,u-1)\,y(t,u-1)",
                "The probability of all ways to reach a node; α(1, 0) is 1.",
            ),
            Equation(
                17, r"\Pr(y|x) = \alpha(T,U)\,\varnothing(T,U)", "The last null ends the alignment."
            ),
            Equation(
                18,
                r"\beta(t,u) = \beta(t+1,u)\,\varnothing(t,u) + \beta(t,u+1)\,y(t,u)",
                "The probability of all ways to continue from a node; β(T, U) is ∅(T, U).",
            ),
        ),
    ),
    Section(
        "Training",
        (
            Equation(
                19,
                r"\Pr(y|x) = \sum_{(t,u):\,t+u=n} \alpha(t,u)\,\beta(t,u)",
                "Every alignment crosses each diagonal once, so that the occupancies of a diagonal "
                "sum to one.",
            ),
            Equation(
                20,
                r"\frac{\partial L}{\partial \Pr(k|t,u)} = -\frac{\alpha(t,u)}{\Pr(y|x)} "
                r"\begin{cases} \beta(t,u+1) & \text{if } k = y_{u+1} \\ "
                r"\beta(t+1,u) & \text{if } k = \varnothing \\ 0 & \text{otherwise} \end{cases}",
                "L is −ln Pr(y|x). The code keeps the product with Pr(k|t,u), so that nothing is "
                "divided by 0.",
            ),
            _gradient(21, "f_t", "u", "U", "The gradient of the transcription vectors."),
            _gradient(22, "g_u", "t", "T", "The gradient of the prediction vectors."),
        ),
    ),
)
