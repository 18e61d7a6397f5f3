# The GPUs for which the kernels are compiled. tests/architectures.cmake tests these functions.

# The compute capabilities of the machine's GPUs, each once, as "9.0;12.0". Empty if `smi` (nvidia-smi) is
# missing or finds no GPU.
function(td_gpus_seen smi out)
  set(found "")
  if(smi)
    execute_process(COMMAND "${smi}" --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE lines ERROR_QUIET
                    RESULT_VARIABLE failed TIMEOUT 60)
    if(NOT failed)
      string(REGEX MATCHALL "[0-9]+[.][0-9]" found "${lines}")
      list(REMOVE_DUPLICATES found)
    endif()
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

# The architectures for GPUs with these capabilities. The compiler knows the architectures `known`
# ("80;90;120"). The result has code for each GPU, and PTX of compute_80 for GPUs that the compiler does not
# know. Without a GPU that can run the kernels: code for Hopper, and this PTX for all others from sm_80 on.
function(td_choose_architectures capabilities known out)
  set(chosen "")
  foreach(capability IN LISTS capabilities)
    string(REPLACE "." "" arch "${capability}")
    if(arch EQUAL 90)
      list(APPEND chosen 90a)
    elseif(arch IN_LIST known AND arch GREATER_EQUAL 80)
      list(APPEND chosen ${arch})
    elseif(arch GREATER 80)
      list(APPEND chosen 80-virtual)
    endif()
  endforeach()
  if(NOT chosen)
    set(chosen 90a 80-virtual)
  endif()
  list(REMOVE_DUPLICATES chosen)
  set(${out} "${chosen}" PARENT_SCOPE)
endfunction()

# nvcc's options for a list of architectures: "90a" is code for sm_90a, "80-virtual" PTX of compute_80.
function(td_architecture_flags architectures out)
  set(flags "")
  foreach(arch IN LISTS architectures)
    if(NOT arch MATCHES "^([0-9]+)([af]?)(-virtual)?$" OR CMAKE_MATCH_1 LESS 80)
      message(FATAL_ERROR "TANDEM_CUDA_ARCHITECTURES has '${arch}', needs AUTO, or a list of architectures of 80 or newer, as 90a "
                          "(its code) or 80-virtual (its PTX)")
    endif()
    set(number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    if(CMAKE_MATCH_3)
      list(APPEND flags "-gencode=arch=compute_${number},code=compute_${number}")
    else()
      list(APPEND flags "-gencode=arch=compute_${number},code=sm_${number}")
    endif()
  endforeach()
  if("90" IN_LIST architectures AND "90a" IN_LIST architectures)
    message(FATAL_ERROR "TANDEM_CUDA_ARCHITECTURES has 90 and 90a: a GPU of 9.0 could load either")
  endif()
  set(${out} "${flags}" PARENT_SCOPE)
endfunction()
