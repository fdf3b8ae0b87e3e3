"""Training graphs at layer granularity, counted as Checkmate's authors count them; built here, not downloaded.

Definitions (read off the authors' published graphs, which the tests hold these against where they are present):
1. A forward node per Keras layer, its output ``elements`` of float32 per sample; then one ``Loss`` node of one element.
2. Per forward node, last first, a backward node of the same size and twice the cost. It reads, for each consumer of
   its layer, the layer's output, the consumer's output and the consumer's backward. Only the last node's output is
   needed at the end: gradients of parameters are counted as a constant.
3. Costs are multiply-accumulates of convolutions and dense layers, one per output element of any other layer that
   computes, and 0 for those that move data.
4. Constant bytes of a step: parameters twice (values and gradients) and the input (§4.3, equation 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ebbtide.step.program import Buffer, Op, Program

__all__ = ["NETWORKS", "LayerGraph", "Network"]

FLOAT = 4  # bytes
CLASSES_SEGMENTATION, CLASSES = 19, 1000


@dataclass(frozen=True)
class LayerGraph:
    """A network's training step per sample.

    Attributes:
        name: of the network.
        layers: per forward node its name, elements, cost and the nodes that it reads.
        input_elements: of one sample.
        parameters: of the network, elements.
    """

    name: str
    layers: tuple[tuple[str, int, float, tuple[int, ...]], ...]
    input_elements: int
    parameters: int

    def program(self, batch: int) -> Program:
        """The training step at ``batch``."""
        layers = [*self.layers, ("Loss", 1, 0.0, (len(self.layers) - 1,))]
        loss = len(layers) - 1
        consumers: list[list[int]] = [[] for _ in layers]
        for k, (_, _, _, reads) in enumerate(layers):
            for b in reads:
                consumers[b].append(k)
        rows = [(name, elements, cost, reads) for name, elements, cost, reads in layers]
        place: dict[int, int] = {}
        for k in range(loss - 1, -1, -1):
            name, elements, cost, _ = layers[k]
            grads = [place[c] for c in consumers[k] if c != loss]
            place[k] = len(rows)
            rows.append((f"{name}_backward", elements, 2 * cost, (k, *consumers[k], *grads)))
        ops = tuple(
            Op(name, "layer", tuple(sorted(set(reads))), (k,), seconds=cost * batch)
            for k, (name, _, cost, reads) in enumerate(rows)
        )
        buffers = tuple(Buffer(name, elements * FLOAT * batch, k) for k, (name, elements, _, _) in enumerate(rows))
        return Program(f"{self.name}-b{batch}", ops, buffers, loss + 1, gradients=(len(ops) - 1,))

    def constant_bytes(self, batch: int) -> int:
        """Definition 4."""
        return FLOAT * (2 * self.parameters + self.input_elements * batch)


@dataclass
class Network:
    """A network while it is written: an image of ``height`` by ``width`` with ``channels``."""

    name: str
    height: int
    width: int
    channels: int = 3
    layers: list[tuple[str, int, float, tuple[int, ...]]] = field(default_factory=list)
    shapes: list[tuple[int, int, int]] = field(default_factory=list)
    parameters: int = 0

    def _shape(self, at: int) -> tuple[int, int, int]:
        return self.shapes[at] if at >= 0 else (self.height, self.width, self.channels)

    def add(self, name: str, shape: tuple[int, int, int], cost: float, *reads: int) -> int:
        """A layer of ``shape`` that reads layers; its index."""
        self.layers.append((name, shape[0] * shape[1] * shape[2], float(cost), tuple(r for r in reads if r >= 0)))
        self.shapes.append(shape)
        return len(self.layers) - 1

    def conv(self, name: str, at: int, out: int, kernel: int = 3, stride: int = 1, *, valid: bool = False) -> int:
        h, w, c = self._shape(at)
        if valid:
            h, w = h - kernel + 1, w - kernel + 1
        h, w = -(-h // stride), -(-w // stride)
        self.parameters += kernel * kernel * c * out + out
        return self.add(name, (h, w, out), h * w * out * kernel * kernel * c, at)

    def depthwise(self, name: str, at: int, stride: int = 1) -> int:
        h, w, c = self._shape(at)
        if stride > 1:
            h, w = (h - 3) // stride + 1, (w - 3) // stride + 1
        self.parameters += 9 * c
        return self.add(name, (h, w, c), h * w * c * 9, at)

    def each(self, name: str, at: int, parameters: int = 0) -> int:
        """A layer that computes one thing per element."""
        h, w, c = self._shape(at)
        self.parameters += parameters * c
        return self.add(name, (h, w, c), h * w * c, at)

    def move(self, name: str, at: int, shape: tuple[int, int, int] | None = None) -> int:
        """A layer that moves data."""
        return self.add(name, shape or self._shape(at), 0, at)

    def pad(self, name: str, at: int, amount: int = 2) -> int:
        h, w, c = self._shape(at)
        return self.move(name, at, (h + amount, w + amount, c))

    def pool(self, name: str, at: int) -> int:
        h, w, c = self._shape(at)
        return self.move(name, at, (h // 2, w // 2, c))

    def up(self, name: str, at: int, factor: int = 2) -> int:
        h, w, c = self._shape(at)
        return self.move(name, at, (h * factor, w * factor, c))

    def concat(self, name: str, one: int, other: int) -> int:
        h, w, c = self._shape(one)
        return self.add(name, (h, w, c + self._shape(other)[2]), 0, one, other)

    def dense(self, name: str, at: int, out: int) -> int:
        h, w, c = self._shape(at)
        self.parameters += h * w * c * out + out
        return self.add(name, (1, 1, out), h * w * c * out, at)

    def graph(self) -> LayerGraph:
        return LayerGraph(self.name, tuple(self.layers), self.height * self.width * self.channels, self.parameters)


def _vgg_blocks(net: Network, convs: tuple[int, ...]) -> list[int]:
    """Blocks of VGG; the pools' indices."""
    at, pools = -1, []
    for block, (count, channels) in enumerate(zip(convs, (64, 128, 256, 512, 512), strict=False), start=1):
        for k in range(1, count + 1):
            at = net.conv(f"block{block}_conv{k}", at, channels)
        at = net.pool(f"block{block}_pool", at)
        pools.append(at)
    return pools


def _vgg(name: str, convs: tuple[int, ...]) -> LayerGraph:
    net = Network(name, 224, 224)
    at = _vgg_blocks(net, convs)[-1]
    h, w, c = net.shapes[at]
    at = net.move("flatten", at, (1, 1, h * w * c))
    for label, out in (("fc1", 4096), ("fc2", 4096), ("predictions", CLASSES)):
        at = net.dense(label, at, out)
    return net.graph()


def vgg16() -> LayerGraph:
    return _vgg("vgg16", (2, 2, 3, 3, 3))


def vgg19() -> LayerGraph:
    return _vgg("vgg19", (2, 2, 4, 4, 4))


def _scores(net: Network, at: int) -> LayerGraph:
    at = net.move("reshape", at)
    net.each("activation", at)
    return net.graph()


def _stage(net: Network, at: int, index: str, channels: int) -> int:
    at = net.pad(f"zero_padding2d{index}", at)
    at = net.conv(f"conv2d{index}", at, channels, valid=True)
    return net.each(f"batch_normalization{index}", at, parameters=4)


def unet() -> LayerGraph:
    """``vgg_unet`` of keras-segmentation at 416 x 608."""
    net = Network("unet", 416, 608)
    pools = _vgg_blocks(net, (2, 2, 3, 3))
    at = _stage(net, pools[3], "", 512)
    for k, (pool, channels) in enumerate(((pools[2], 256), (pools[1], 128), (pools[0], 64)), start=1):
        at = net.up(f"up_sampling2d_{k - 1}", at)
        at = net.concat(f"concatenate_{k - 1}", pool, at)
        at = _stage(net, at, f"_{k}", channels)
    return _scores(net, net.conv("conv2d_4", at, CLASSES_SEGMENTATION))


def segnet() -> LayerGraph:
    """``vgg_segnet`` of keras-segmentation at 416 x 608."""
    net = Network("segnet", 416, 608)
    at = _stage(net, _vgg_blocks(net, (2, 2, 3, 3))[3], "", 512)
    for k, channels in enumerate((256, 128, 64), start=1):
        at = net.up(f"up_sampling2d_{k - 1}", at)
        at = _stage(net, at, f"_{k}", channels)
    return _scores(net, net.conv("conv2d_4", at, CLASSES_SEGMENTATION))


def fcn8() -> LayerGraph:
    """``fcn_8_vgg`` of keras-segmentation at 416 x 608."""
    net = Network("fcn8", 416, 608)
    pools = _vgg_blocks(net, (2, 2, 3, 3, 3))
    at = pools[4]
    for k, kernel in ((5, 7), (6, 1)):
        at = net.conv(f"conv2d_{k}", at, 4096, kernel)
        at = net.move(f"dropout_{k - 5}", at)
    at = net.conv("conv2d_7", at, CLASSES_SEGMENTATION, 1)
    for k, pool in enumerate((pools[3], pools[2])):
        at = _transposed(net, f"conv2d_transpose_{k}", at, 2, 4)
        h, w, _ = net.shapes[pool]
        top, _, channels = net.shapes[at]
        at = net.move(f"cropping2d_{2 * k}", at, (top, w, channels))
        if k == 0:
            at = net.move("cropping2d_1", at, (h, w, channels))
        other = net.conv(f"conv2d_{8 + k}", pool, CLASSES_SEGMENTATION, 1)
        if k == 1:
            at = net.move("cropping2d_3", at, (h, w, channels))
        at = net.add(f"add_{k}", (h, w, channels), 2 * h * w * channels, at, other)
    return _scores(net, _transposed(net, "conv2d_transpose_2", at, 8, 16))


def _transposed(net: Network, name: str, at: int, stride: int, kernel: int) -> int:
    h, w, c = net.shapes[at]
    net.parameters += kernel * kernel * c * c
    out = ((h - 1) * stride + kernel, (w - 1) * stride + kernel, c)
    return net.add(name, out, out[0] * out[1] * c * c, at)


def resnet50() -> LayerGraph:
    net = Network("resnet50", 224, 224)
    at = net.pad("conv1_pad", -1, 6)
    h = (230 - 7) // 2 + 1
    net.parameters += 7 * 7 * 3 * 64 + 64
    at = net.add("conv1_conv", (h, h, 64), h * h * 64 * 147, at)
    at = net.each("conv1_relu", net.each("conv1_bn", at, parameters=4))
    at = net.pad("pool1_pad", at)
    at = net.add("pool1_pool", (56, 56, 64), 0, at)
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=2):
        for block in range(1, blocks + 1):
            stride = 2 if block == 1 and stage > 2 else 1
            at = _bottleneck(net, f"conv{stage}_block{block}", at, width, stride, block == 1)
    at = net.add("avg_pool", (1, 1, 2048), 49 * 2048, at)
    net.dense("probs", at, CLASSES)
    return net.graph()


def _bottleneck(net: Network, name: str, at: int, width: int, stride: int, project: bool) -> int:
    entry = at
    for k, (kernel, step) in enumerate(((1, stride), (3, 1)), start=1):
        at = net.conv(f"{name}_{k}_conv", at, width, kernel, step)
        at = net.each(f"{name}_{k}_bn", at, parameters=4)
        at = net.each(f"{name}_{k}_relu", at)
    short = net.conv(f"{name}_0_conv", entry, 4 * width, 1, stride) if project else entry
    at = net.conv(f"{name}_3_conv", at, 4 * width, 1)
    if project:
        short = net.each(f"{name}_0_bn", short, parameters=4)
    at = net.each(f"{name}_3_bn", at, parameters=4)
    h, w, c = net.shapes[at]
    return net.each(f"{name}_out", net.add(f"{name}_add", (h, w, c), h * w * c, short, at))


def mobilenet() -> LayerGraph:
    net = Network("mobilenet", 224, 224)
    at = net.pad("conv1_pad", -1, 1)
    net.parameters += 27 * 32
    at = net.add("conv1", (112, 112, 32), 112 * 112 * 32 * 27, at)
    at = net.each("conv1_relu", net.each("conv1_bn", at, parameters=4))
    outs = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
    for k, (out, stride) in enumerate(outs, start=1):
        if stride == 2:
            at = net.pad(f"conv_pad_{k}", at, 1)
        at = net.depthwise(f"conv_dw_{k}", at, stride)
        at = net.each(f"conv_dw_{k}_relu", net.each(f"conv_dw_{k}_bn", at, parameters=4))
        at = net.conv(f"conv_pw_{k}", at, out, 1)
        at = net.each(f"conv_pw_{k}_relu", net.each(f"conv_pw_{k}_bn", at, parameters=4))
    at = net.add("global_average_pooling2d", (1, 1, 1024), 49 * 1024, at)
    at = net.move("dropout", net.move("reshape_1", at))
    at = net.conv("conv_preds", at, CLASSES, 1)
    net.each("act_softmax", net.move("reshape_2", at))
    return net.graph()


NETWORKS: dict[str, Callable[[], LayerGraph]] = {
    "unet": unet,
    "fcn8": fcn8,
    "segnet": segnet,
    "vgg16": vgg16,
    "vgg19": vgg19,
    "resnet50": resnet50,
    "mobilenet": mobilenet,
}
