// SPIRV-Cross includes Apple's vector types beside metal_stdlib; Taichi kernels use uint3 alone, defined there.
#pragma once
