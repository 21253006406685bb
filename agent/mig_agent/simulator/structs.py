"""The C structures of nvml.h that the simulated library fills, written from the header and not taken from pynvml."""

from __future__ import annotations

from ctypes import (
    Structure,
    Union,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_longlong,
    c_uint,
    c_uint32,
    c_ulonglong,
    c_void_p,
)


class PlacementStruct(Structure):
    """nvmlGpuInstancePlacement_t and nvmlComputeInstancePlacement_t."""

    _fields_ = (("start", c_uint), ("size", c_uint))


_PROFILE_COUNTS = (
    "id",
    "isP2pSupported",
    "sliceCount",
    "instanceCount",
    "multiprocessorCount",
    "copyEngineCount",
    "decoderCount",
    "encoderCount",
    "jpegCount",
    "ofaCount",
)


class ProfileInfo(Structure):
    """nvmlGpuInstanceProfileInfo_t."""

    _fields_ = (*((name, c_uint) for name in _PROFILE_COUNTS), ("memorySizeMB", c_ulonglong))


class ProfileInfoV2(Structure):
    """nvmlGpuInstanceProfileInfo_v2_t."""

    _fields_ = (
        ("version", c_uint),
        *((name, c_uint) for name in _PROFILE_COUNTS),
        ("memorySizeMB", c_ulonglong),
        ("name", c_char * 96),
    )


PROFILE_INFO_V2 = 0x02000098


class GpuInstanceInfo(Structure):
    """nvmlGpuInstanceInfo_t."""

    _fields_ = (("device", c_void_p), ("id", c_uint), ("profileId", c_uint), ("placement", PlacementStruct))


_COMPUTE_COUNTS = (
    "id",
    "sliceCount",
    "instanceCount",
    "multiprocessorCount",
    "sharedCopyEngineCount",
    "sharedDecoderCount",
    "sharedEncoderCount",
    "sharedJpegCount",
    "sharedOfaCount",
)


class ComputeProfileInfo(Structure):
    """nvmlComputeInstanceProfileInfo_t."""

    _fields_ = tuple((name, c_uint) for name in _COMPUTE_COUNTS)


class ComputeProfileInfoV2(Structure):
    """nvmlComputeInstanceProfileInfo_v2_t."""

    _fields_ = (("version", c_uint), *((name, c_uint) for name in _COMPUTE_COUNTS), ("name", c_char * 96))


COMPUTE_PROFILE_INFO_V2 = 0x02000088


class ComputeInstanceInfo(Structure):
    """nvmlComputeInstanceInfo_t."""

    _fields_ = (
        ("device", c_void_p),
        ("gpuInstance", c_void_p),
        ("id", c_uint),
        ("profileId", c_uint),
        ("placement", PlacementStruct),
    )


class DeviceAttributes(Structure):
    """nvmlDeviceAttributes_t."""

    _fields_ = (
        ("multiprocessorCount", c_uint),
        ("sharedCopyEngineCount", c_uint),
        ("sharedDecoderCount", c_uint),
        ("sharedEncoderCount", c_uint),
        ("sharedJpegCount", c_uint),
        ("sharedOfaCount", c_uint),
        ("gpuInstanceSliceCount", c_uint),
        ("computeInstanceSliceCount", c_uint),
        ("memorySizeMB", c_ulonglong),
    )


class Memory(Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class MemoryV2(Structure):
    """nvmlMemory_v2_t, in bytes."""

    _fields_ = (
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    )


MEMORY_V2 = 0x02000028


class SetMemoryLimits(Structure):
    """nvmlSetMemoryLimits_v1_t; limits in bytes."""

    _fields_ = (("nameSpace", c_char_p), ("softLimit", c_ulonglong), ("hardLimit", c_ulonglong))


class GetMemoryLimits(Structure):
    """nvmlGetMemoryLimits_v1_t; limits in bytes."""

    _fields_ = (*SetMemoryLimits._fields_, ("currentUsed", c_ulonglong))


MEMORY_LIMIT_MAX = 0xFFFFFFFFFFFFFFFF


class PciInfo(Structure):
    """nvmlPciInfo_t."""

    _fields_ = (
        ("busIdLegacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("pciDeviceId", c_uint),
        ("pciSubSystemId", c_uint),
        ("busId", c_char * 32),
    )


class ProcessInfo(Structure):
    """nvmlProcessInfo_t; memory in bytes."""

    _fields_ = (
        ("pid", c_uint),
        ("usedGpuMemory", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    )


NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
NO_INSTANCE = 0xFFFFFFFF


class Utilization(Structure):
    """nvmlUtilization_t, in percent."""

    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class FieldUnion(Union):
    """nvmlValue_t."""

    _fields_ = (("dVal", c_double), ("uiVal", c_uint), ("ullVal", c_ulonglong), ("sllVal", c_longlong))


class FieldValue(Structure):
    """nvmlFieldValue_t."""

    _fields_ = (
        ("fieldId", c_uint32),
        ("scopeId", c_uint32),
        ("timestamp", c_int64),
        ("latencyUsec", c_int64),
        ("valueType", c_int),
        ("nvmlReturn", c_int),
        ("value", FieldUnion),
    )


class EventData(Structure):
    """nvmlEventData_t."""

    _fields_ = (
        ("device", c_void_p),
        ("eventType", c_ulonglong),
        ("eventData", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    )


class GpmSupport(Structure):
    """nvmlGpmSupport_t."""

    _fields_ = (("version", c_uint), ("isSupportedDevice", c_uint))


GPM_SUPPORT_VERSION = 1


class GpmMetric(Structure):
    """nvmlGpmMetric_t; the last three fields are nvmlGpmMetric_t's metricInfo."""

    _fields_ = (
        ("metricId", c_uint),
        ("nvmlReturn", c_int),
        ("value", c_double),
        ("shortName", c_void_p),
        ("longName", c_void_p),
        ("unit", c_void_p),
    )


class GpmMetricsHead(Structure):
    """The beginning of nvmlGpmMetricsGet_t, behind which `numMetrics` GpmMetric are used; its full length varies."""

    _fields_ = (("version", c_uint), ("numMetrics", c_uint), ("sample1", c_void_p), ("sample2", c_void_p))


GPM_METRICS_VERSION = 1
